"""Memory that batches are made in."""
