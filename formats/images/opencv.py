"""OpenCV, with its pixel limit set before the import; releases that hide damage are refused."""

from __future__ import annotations

import os

from shardprep.formats.images.info import MAX_PIXELS

os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

import cv2

# Other packages, such as opencv-python, install a cv2 in the same place, of which pip checks no version.
if tuple(map(int, cv2.__version__.split(".")[:2])) < (4, 12):
    raise ImportError(
        f"OpenCV {cv2.__version__} decodes truncated images without an error: uninstall other packages of OpenCV, "
        "and install opencv-python-headless 4.12 or newer"
    )

__all__ = ["cv2"]
