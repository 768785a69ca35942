"""A record, its label, and the values of its columns."""
