"""What identifies a run, its steps made again, and where two runs part."""
