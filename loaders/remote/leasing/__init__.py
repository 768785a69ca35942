"""Which sender makes which step."""
