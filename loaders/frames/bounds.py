"""What a frame may hold, and the error for one that does not keep to it."""

from __future__ import annotations

from typing import Any

from shardprep.formats.errors import DataError

DTYPES = frozenset(
    ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]
)
MAX_DIMENSIONS = 32
MAX_SIZE = (1 << 63) - 1  # what numpy can address


class FrameDamaged(DataError):
    """A frame that :func:`.codec.pack_batch` and :func:`.codec.pack_note` do not make. It is not used."""


def is_count(value: Any) -> bool:
    """Whether a value of a description is a number of bytes, items or rows."""
    return type(value) is int and 0 <= value <= MAX_SIZE
