"""A converted dataset: manifest, index, and reading."""
