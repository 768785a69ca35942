"""The loader of a dataset."""
