"""OpenCV, with its pixel limit set before the import; releases that hide damage are refused."""

from __future__ import annotations

import os
import re

from shardprep.formats.images.info import MAX_PIXELS

os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

import cv2


def require_opencv(version: str) -> None:
    """Raise ImportError below 4.12, which returns truncated JPEGs with other images' pixels."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (4, 12):
        raise ImportError(
            f"OpenCV {version} decodes truncated images without an error: "
            "install opencv-python-headless 4.12 or newer"
        )


require_opencv(cv2.__version__)

__all__ = ["cv2", "require_opencv"]
