"""Where the pixels of a result come from, and masks and boxes at the same place."""
