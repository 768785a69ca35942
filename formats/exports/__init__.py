"""From a dataset to the formats of other loaders."""
