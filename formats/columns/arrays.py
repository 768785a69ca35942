"""Values that are NumPy arrays of one dtype, with fixed and free dimensions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import MAX_VALUE_BYTES, BadValue, Codec, bounded, refused

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
MAX_DIMENSIONS = 8
FREE = "*"
SIZE = np.dtype("<u4")  # of a free dimension, before the array's bytes

_KIND = re.compile(r"(\w+)\[([^\[\]]*)\]")


@dataclass(frozen=True)
class ArrayCodec(Codec):
    """Arrays of ``element``, a name of DTYPES; None in ``shape`` is a dimension of any size.

    The bytes are the sizes of the free dimensions (u32), then the elements, in C order and little-endian.
    Decoded arrays are read-only; those without dimensions are NumPy scalars.
    """

    element: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, kind: str) -> ArrayCodec | None:
        """Return the codec of a kind such as ``float32[*,4]``, None if it is not an array's."""
        found = _KIND.fullmatch(kind)
        if found is None or found[1] not in DTYPES:
            return None
        sizes = [size.strip() for size in found[2].split(",")] if found[2].strip() else []
        if len(sizes) > MAX_DIMENSIONS or not all(size == FREE or _is_size(size) for size in sizes):
            return None
        shape = tuple(None if size == FREE else int(size) for size in sizes)
        codec = cls(found[1], shape)
        fixed = math.prod(size for size in shape if size is not None) * codec.elements.itemsize
        return codec if fixed <= MAX_VALUE_BYTES else None

    @property
    def kind(self) -> str:
        """The text of which :meth:`of` makes this codec."""
        sizes = (FREE if size is None else str(size) for size in self.shape)
        return f"{self.element}[{','.join(sizes)}]"

    @cached_property
    def elements(self) -> np.dtype[Any]:
        return np.dtype(self.element).newbyteorder("<")

    @cached_property
    def dtype(self) -> np.dtype[Any] | None:  # type: ignore[override]
        return None if None in self.shape else np.dtype((self.elements, self.shape))

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, np.ndarray | np.generic) or value.dtype != self.elements:
            raise refused(value, self.kind)
        if not self._fits(value.shape):
            raise refused(value, self.kind)
        free = [size for size, fixed in zip(value.shape, self.shape, strict=True) if fixed is None]
        return bounded(np.array(free, SIZE).tobytes() + np.ascontiguousarray(value).tobytes())

    def decode(self, data: bytes) -> npt.NDArray[Any]:
        start = self.shape.count(None) * SIZE.itemsize
        if len(data) < start:
            raise self._other_size(data)
        free = iter(np.frombuffer(data, SIZE, start // SIZE.itemsize).tolist())
        shape = tuple(next(free) if size is None else size for size in self.shape)
        if len(data) - start != math.prod(shape) * self.elements.itemsize:
            raise self._other_size(data)
        array = np.frombuffer(data, self.elements, math.prod(shape), start).reshape(shape)
        return array if shape else array[()]

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and all(
            fixed in (None, size) for size, fixed in zip(shape, self.shape, strict=True)
        )

    def _other_size(self, data: bytes) -> BadValue:
        return BadValue(f"has {len(data)} bytes, which are not {self.kind}")


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9
