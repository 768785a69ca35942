"""The kinds of image files: each read by its own rules, without decoding."""
