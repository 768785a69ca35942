"""From shards to the training step."""
