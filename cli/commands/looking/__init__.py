"""The sub-commands of ``prep`` that show what is in a dataset, or what came out of it."""
