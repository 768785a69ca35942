"""The file names of images."""

from __future__ import annotations

IMAGE_SUFFIXES = (
    *(".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif"),
    *(".jp2", ".j2k", ".jpc", ".pbm", ".pgm", ".ppm", ".pnm", ".avif", ".ras", ".sr"),
    *(".heic", ".heif", ".jxl", ".exr", ".hdr", ".pfm", ".pam"),  # found, to be refused by name
)
"""The suffixes by which a file is taken for an image; its bytes decide whether it is one."""
