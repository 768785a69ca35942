"""Record keys: one name for an image, however the dataset is packed."""

from __future__ import annotations

import re

_TRAIN = re.compile(r"(n\d{8})_\d+", re.ASCII)
_FLAT = re.compile(r"ILSVRC2012_(?:val|test)_\d{8}", re.ASCII)
_IMAGE = re.compile(r"(.+)\.(?:JPEG|jpeg|jpg)", re.DOTALL)


def record_key(class_name: str, relative_path: str) -> str:
    """The key of an image that lies at ``relative_path`` (with ``/``) below its split's folder.

    ``n01440764_7.JPEG`` of class n01440764 is ``n01440764/n01440764_7``, a validation or test image is
    its stem alone, so that tars, trees and Kaggle agree; any other file is its path, and so unique.
    """
    image = _IMAGE.fullmatch(relative_path.rpartition("/")[2])
    key = official_key(image[1]) if image else None
    if key is None or ("/" in key and not key.startswith(class_name + "/")):
        return relative_path
    return key


def official_key(stem: str) -> str | None:
    """The key of an image by its official name without extension; None for any other name."""
    if train := _TRAIN.fullmatch(stem):
        return f"{train[1]}/{stem}"
    return stem if _FLAT.fullmatch(stem) else None
