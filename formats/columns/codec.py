"""The contract of a column's values: from a Python value to bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from shardprep.formats.errors import DataError
from shardprep.formats.printable import printable

MAX_VALUE_BYTES = 64 << 20  # as many as an image may have


class BadValue(DataError):
    """A value that a column of this kind cannot hold; ``key`` is its record's."""


class Codec(ABC):
    """The values of one kind of column.

    Equal values give equal bytes, and ``decode(encode(value))`` equals ``value`` in type, shape and content.
    Pure, thread-safe and picklable.
    """

    dtype: np.dtype[Any] | None = None
    """The dtype of a value in a table, for values of one size; None where sizes differ."""

    @property
    def size(self) -> int | None:
        """The number of bytes of every value; None where it differs."""
        return None if self.dtype is None else self.dtype.itemsize

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value. Raises BadValue for one that the column cannot hold."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value of such bytes. Raises BadValue for any others."""


def refused(value: object, expected: str) -> BadValue:
    """Return the error for a value that is not what the column holds."""
    shape = f" of shape {value.shape} and dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    text = "" if isinstance(value, np.ndarray | bytes) else f" {printable(repr(value)[:80])}"
    return BadValue(f"expected {expected}, not {type(value).__name__}{text}{shape}")


def bounded(data: bytes) -> bytes:
    """Return the bytes of a value. Raises BadValue for more than MAX_VALUE_BYTES."""
    if len(data) > MAX_VALUE_BYTES:
        raise BadValue(f"has {len(data)} bytes; a value may have {MAX_VALUE_BYTES}")
    return data
