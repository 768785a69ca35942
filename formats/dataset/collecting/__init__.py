"""Collections: several finished datasets as one, under one root."""
