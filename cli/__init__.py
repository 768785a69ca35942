"""Words to the user: one command per file."""
