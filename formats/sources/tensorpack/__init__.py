"""LMDB files that tensorpack wrote."""
