"""Worker processes that fill slots."""
