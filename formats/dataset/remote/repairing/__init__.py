"""Repair of a dataset: from what it was converted from, or from a copy in object storage."""
