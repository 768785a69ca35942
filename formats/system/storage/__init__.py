"""Object storage and servers of files: places there, and their client."""
