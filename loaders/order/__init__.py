"""The order of an epoch's records, and the proof that each came once."""
