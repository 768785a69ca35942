"""Verified copies of published datasets, from object storage or a server."""
