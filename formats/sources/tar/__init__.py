"""Tar archives, read without unpacking."""
