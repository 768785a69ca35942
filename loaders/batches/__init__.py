"""Memory for batches, and the stacking of records into them."""
