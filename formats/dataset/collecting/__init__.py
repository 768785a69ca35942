"""Collections: finished datasets whose records are numbered one after the other, under one root."""
