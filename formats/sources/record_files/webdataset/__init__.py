"""Tar shards of WebDataset."""
