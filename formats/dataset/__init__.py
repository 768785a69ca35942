"""A converted dataset: manifest, index, reading and verification."""
