"""Image files: reading headers, and checking that they decode."""
