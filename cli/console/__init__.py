"""What commands share: options, messages and progress bars."""
