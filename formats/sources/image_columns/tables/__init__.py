"""Tables of values in text: CSV files and JSON lines, read row by row."""
