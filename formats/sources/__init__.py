"""What can be converted: official archives, image trees, files of tensorpack, lists."""
