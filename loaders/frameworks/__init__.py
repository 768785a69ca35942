"""Batches into TensorFlow and Keras."""
