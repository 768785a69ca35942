"""What a step of a run delivered, made again; and where two runs part."""
