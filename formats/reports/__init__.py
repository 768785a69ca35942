"""What is in a dataset, examined and shown as a page."""
