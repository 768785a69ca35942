"""One record: its bytes, checksum, digest and labels."""
