"""The sub-commands of ``prep``, one per file."""
