"""The loader of a dataset, its stats, and its runs: replayed, compared and shown."""
