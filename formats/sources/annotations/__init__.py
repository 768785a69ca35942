"""Labels and boxes that are published beside the images."""
