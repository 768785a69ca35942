"""Datasets in object storage and on servers."""
