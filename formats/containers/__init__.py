"""Shard files: one contract; LMDB, HDF5 and tables of places in an archive behind it."""
