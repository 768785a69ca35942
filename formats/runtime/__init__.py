"""Files, processes and progress: what all of this package needs of the system."""
