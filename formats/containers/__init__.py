"""Shard files: one contract, LMDB and HDF5 behind it."""
