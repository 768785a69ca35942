"""Executors that the caller gave: calls on other machines, how they fail, and what these machines must be."""
