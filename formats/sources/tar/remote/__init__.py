"""Tar archives in object storage or on a server, read in place by ranges."""
