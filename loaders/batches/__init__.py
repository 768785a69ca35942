"""Memory that batches are made in, and records stacked to them."""
