"""The bounds of transcoding: the quality of shrunk images, and by how much an image may grow."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DEFAULT_QUALITY = 90
MAX_GROWTH = 1.25  # of an image; one that grows more stays as it is, so that a shard's size is known before


def encoder_version() -> str:
    """Return the version of OpenCV, which encodes shrunk images, such as "OpenCV 5.0.0.93"."""
    for name in ("opencv-python-headless", "opencv-python"):
        try:
            return f"OpenCV {version(name)}"
        except PackageNotFoundError:
            continue
    from shardprep.formats.images.opencv import cv2  # start-up time

    return f"OpenCV {cv2.__version__}"
