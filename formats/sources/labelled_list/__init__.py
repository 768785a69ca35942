"""Lists of images with their labels: text, CSV and JSON lines."""
