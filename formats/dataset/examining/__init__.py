"""What is in a dataset: statistics of its index and its pixels, duplicates, and what is odd."""
