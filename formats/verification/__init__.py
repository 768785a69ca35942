"""Verification that a dataset is complete and intact, at four levels."""
