"""Batches between processes and machines: frames, keys, leases, and both ends."""
