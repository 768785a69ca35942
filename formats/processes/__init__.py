"""Processes and threads: their start, their messages and their end."""
