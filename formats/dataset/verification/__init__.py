"""Verification of a dataset: its files, tables, records and columns, each against the manifest."""
