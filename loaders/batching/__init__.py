"""From records to batches."""
