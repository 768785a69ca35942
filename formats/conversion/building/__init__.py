"""One shard at a time: the plan of a conversion, the folder of its work, and the building of a shard."""
