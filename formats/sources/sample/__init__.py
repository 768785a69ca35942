"""A small dataset in the form of the official archives."""
