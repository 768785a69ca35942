"""The shards of a remote dataset, in a cache before the workers read them."""
