"""The values of a row, from the objects that pyarrow makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardprep.formats.columns.arrays import ArrayCodec
from shardprep.formats.columns.schema import Field
from shardprep.formats.records.labels import UNLABELLED


def image_of(value: Any) -> bytes:
    """Return the bytes of an image, with its path beside it or not. Raises ValueError if there are none."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        path = value.get("path") if isinstance(value, dict) else None
        raise ValueError(f"has no bytes of the image, only its path {path!r}: embed the images")
    return data


def value_of(value: Any, field: Field) -> Any:
    """Return the value as its column takes it. Raises ValueError and TypeError for what it cannot be."""
    if field.kind == "image":
        return image_of(value)
    if field.kind == "label":
        return UNLABELLED if value is None else value
    if field.kind in ("json", "text"):
        return _plain(value)
    if isinstance(field.codec, ArrayCodec):
        array = np.array(value, field.codec.elements)
        return array if array.shape else array[()]
    return value


def _plain(value: Any) -> Any:
    """Return the value with times and decimals as text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else str(value)
