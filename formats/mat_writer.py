"""Writing a struct array as a MATLAB 5 file (MAT-File Format, chapter 1), for the sample's devkit."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

INT8, INT32, UINT16, UINT32, DOUBLE, MATRIX, COMPRESSED = 1, 5, 4, 6, 9, 14, 15  # table 1-1
STRUCT, CHAR, DOUBLE_ARRAY = 2, 4, 6  # table 1-3
VERSION = b"\x00\x01IM"  # 1.0, little-endian
NAME_BYTES = 32  # a field's name, with the zero that ends it

Cell = str | float | Sequence[float]


def write_struct_array(name: str, columns: Mapping[str, Sequence[Cell]], *, comment: str) -> bytes:
    """A file with one struct array of shape (n, 1). Deterministic: the usual time is not in it.

    A cell is text, a number, or a row of numbers.
    """
    rows = zip(*columns.values(), strict=True)
    cells = [_cell(value) for row in rows for value in row]
    parts = [
        _element(INT32, struct.pack("<i", NAME_BYTES)),
        _element(INT8, b"".join(field.encode().ljust(NAME_BYTES, b"\0") for field in columns)),
        *cells,
    ]
    array = _array(STRUCT, (len(cells) // len(columns), 1), parts, name=name)
    packed = zlib.compress(array)
    header = comment.encode().ljust(116)[:116] + bytes(8) + VERSION
    return header + struct.pack("<II", COMPRESSED, len(packed)) + packed


def _cell(value: Cell) -> bytes:
    if isinstance(value, str):
        data = _element(UINT16, value.encode("utf-16-le"))
        return _array(CHAR, (1, len(value)), [data])
    numbers = [value] if isinstance(value, int | float) else list(value)
    data = _element(DOUBLE, struct.pack(f"<{len(numbers)}d", *numbers))
    return _array(DOUBLE_ARRAY, (1, len(numbers)), [data])


def _array(kind: int, shape: tuple[int, int], parts: Sequence[bytes], *, name: str = "") -> bytes:
    head = [
        _element(UINT32, struct.pack("<II", kind, 0)),
        _element(INT32, struct.pack("<2i", *shape)),
        _element(INT8, name.encode()),
    ]
    return _element(MATRIX, b"".join([*head, *parts]))


def _element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)
