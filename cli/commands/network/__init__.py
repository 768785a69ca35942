"""The sub-commands of ``prep`` that work over a network."""
