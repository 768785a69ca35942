"""Batches as tensors, and their signature."""
