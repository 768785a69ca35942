"""Columns added to a finished dataset, of which nothing is written again."""
