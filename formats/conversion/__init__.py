"""From a source, or any items, to published shards; repair, and columns joined later."""
