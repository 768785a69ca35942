"""The sub-commands of ``prep``, by subject."""
