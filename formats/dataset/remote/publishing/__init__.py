"""Datasets brought into object storage: uploaded, proven there, and published by their manifest."""
