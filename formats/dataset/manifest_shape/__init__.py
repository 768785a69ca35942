"""The shape of a manifest: its parts, their types, and what must agree between them."""
