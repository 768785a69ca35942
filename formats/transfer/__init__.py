"""Whole datasets from and to object storage: fetched, published, converted there, repaired."""
