"""OpenCV, with its pixel limit set before the import."""

from __future__ import annotations

import os

from shardprep.formats.images.info import MAX_PIXELS

os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

import cv2

__all__ = ["cv2"]
