"""OpenCV with its limit set, which it reads only once, and without the releases that hide damage."""

from __future__ import annotations

import os
import re

from .image_header import MAX_PIXELS

OLDEST = (4, 12)

os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

import cv2  # noqa: E402


def require_opencv(version: str) -> None:
    """Raise ImportError below 4.12, which hands out truncated JPEGs as images, partly of other ones."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise ImportError(
            f"OpenCV {version} decodes truncated images without an error: "
            "install opencv-python-headless 4.12 or newer"
        )


require_opencv(cv2.__version__)

__all__ = ["cv2", "require_opencv"]
