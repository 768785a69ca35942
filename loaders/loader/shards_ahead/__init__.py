"""Shards before the workers read them: downloaded into a cache, and read ahead from the disk."""
