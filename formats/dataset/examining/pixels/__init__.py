"""What is measured of the pixels of images, in worker processes, and merged."""
