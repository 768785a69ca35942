"""Data that is made up, in the shape of a loader, to measure what is behind it."""
