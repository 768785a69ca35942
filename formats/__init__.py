"""What is on disk: sources, records, shards, manifest, conversion, verification."""
