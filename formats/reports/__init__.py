"""Reports: the content of a dataset, examined and shown as a page."""
