"""Parquet files with images, as Hugging Face's datasets have them."""
