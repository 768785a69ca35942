"""Sources that can be converted: official archives, folders, lists, record files, and a sample."""
