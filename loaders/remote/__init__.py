"""Batches between machines, authenticated and exact."""
