"""Keys, and the proof of being a sender or a receiver."""
