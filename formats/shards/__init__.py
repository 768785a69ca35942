"""A dataset on disk: its shards, tables, columns and manifest, and the reading of its records."""
