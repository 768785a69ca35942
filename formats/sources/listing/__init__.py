"""The listing of a source: one row per image, in order."""
