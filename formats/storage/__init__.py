"""Datasets in object storage and on servers, their cache, and collections of datasets."""
