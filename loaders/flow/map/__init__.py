"""A function applied to each item, in threads or processes."""
