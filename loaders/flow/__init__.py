"""Flow: any Python data, composed into a pipeline."""
