"""Data that the package comes with: the words of the classes, and photographs."""
