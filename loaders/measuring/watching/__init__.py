"""The state of a running loader or flow, on a terminal or in a notebook."""
