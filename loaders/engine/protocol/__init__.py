"""The messages and the shared state between a loader and its workers."""
