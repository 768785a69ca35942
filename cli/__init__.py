"""The command ``prep``."""
