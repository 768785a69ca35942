"""Steps that order, group, keep or combine items."""
