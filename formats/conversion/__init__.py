"""From a source to published shards."""
