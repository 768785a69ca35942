"""Conversion of sources, and of any items, to published shards; joins of columns."""
