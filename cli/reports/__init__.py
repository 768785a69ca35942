"""What commands say about their results, where that takes more than a few lines."""
