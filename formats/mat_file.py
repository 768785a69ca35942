"""MATLAB 5 files (MAT-File Format, chapter 1), as far as the devkit needs them: a struct array.

scipy reads them all, but crashes on some damaged ones; this reader raises.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MAX_INFLATED_BYTES = 16 << 20  # the 1,860 synsets of the official one take about 1 KB each

_HEADER_BYTES = 128
_BYTE_ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}
_MATRIX, _COMPRESSED = 14, 15  # table 1-1, data types
_NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_STRUCT, _CHAR, _FIRST_NUMERIC, _LAST_NUMERIC = 2, 4, 6, 15  # table 1-3, array types

Value = str | int | float | None


class _Element(NamedTuple):
    kind: int
    data: bytes


def read_struct_array(data: bytes, name: str) -> list[dict[str, Value]]:
    """The rows of the struct array ``name``: numbers and text, None for any other field.

    Raises ValueError for a damaged file, and for one that inflates to more than the limit.
    """
    order = _BYTE_ORDERS.get(data[124:_HEADER_BYTES])
    if order is None:
        raise ValueError("not a MATLAB 5 file")
    if len(data) > MAX_INFLATED_BYTES:
        raise ValueError(f"it has more than {MAX_INFLATED_BYTES} bytes")
    for element in _variables(data, order):
        parts = list(_elements(element.data, order))
        if element.kind == _MATRIX and len(parts) >= 5 and parts[2].data == name.encode():
            return _rows(parts, order)
    raise ValueError(f"there is no struct array {name!r}")


def _variables(data: bytes, order: str) -> Iterator[_Element]:
    """The elements of the whole file, inflated where they are compressed."""
    budget = MAX_INFLATED_BYTES
    for element in _elements(data[_HEADER_BYTES:], order):
        if element.kind == _COMPRESSED:
            inflated = _inflate(element.data, budget)
            budget -= len(inflated)
            yield from _elements(inflated, order)
        else:
            yield element


def _inflate(data: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(f"it cannot be inflated ({error})") from None
    if len(inflated) > limit or not inflater.eof:
        raise ValueError(f"it is cut off, or inflates to more than {MAX_INFLATED_BYTES} bytes")
    return inflated


def _elements(data: bytes, order: str) -> Iterator[_Element]:
    """Tag and data, again and again: padded to 8 bytes, or both in 8 bytes, where 4 are enough."""
    at = 0
    while at < len(data):
        if len(data) - at < 8:
            raise ValueError("it is cut off")
        kind, size = struct.unpack_from(order + "II", data, at)
        start = at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if size > (len(data) - start if start == at + 8 else 4):
            raise ValueError("it is cut off")
        yield _Element(kind, data[start : start + size])
        at = start + size if kind == _COMPRESSED else -(-(start + size) // 8) * 8


def _rows(parts: list[_Element], order: str) -> list[dict[str, Value]]:
    """Flags, dimensions, name, length of a field's name, the fields' names; then field by field."""
    shape, lengths = _numbers(parts[1], order), _numbers(parts[3], order)
    length = int(lengths[0]) if lengths else 0
    if _class(parts, order) != _STRUCT or length < 1:
        raise ValueError("it is not a struct array")
    text, values = parts[4].data, parts[5:]
    names = [text[at : at + length].split(b"\0")[0].decode("latin-1") for at in range(0, len(text), length)]
    if not names or math.prod(shape) * len(names) != len(values):
        raise ValueError("its struct array is not complete")
    starts = range(0, len(values), len(names))
    fields = [_value(value, order) for value in values]
    return [dict(zip(names, fields[at : at + len(names)], strict=True)) for at in starts]


def _value(element: _Element, order: str) -> Value:
    parts = list(_elements(element.data, order)) if element.kind == _MATRIX else []
    if len(parts) != 4:  # flags, dimensions, name, data; complex numbers and structs have more
        return None
    array_class = _class(parts, order)
    if array_class == _CHAR:
        return _text(parts[3], order)
    numbers = _numbers(parts[3], order) if _FIRST_NUMERIC <= array_class <= _LAST_NUMERIC else ()
    return numbers[0] if len(numbers) == 1 else None


def _class(parts: list[_Element], order: str) -> int:
    flags = _numbers(parts[0], order)
    return int(flags[0]) & 0xFF if flags else 0


def _text(element: _Element, order: str) -> str | None:
    codec = _TEXTS.get(element.kind)
    if codec == "utf-16":
        codec += "-le" if order == "<" else "-be"
    return None if codec is None else element.data.decode(codec, errors="replace")


def _numbers(element: _Element, order: str) -> tuple[int | float, ...]:
    letter = _NUMBERS.get(element.kind)
    if letter is None:
        raise ValueError("it has numbers of an unknown kind")
    count, rest = divmod(len(element.data), struct.calcsize(order + letter))
    if rest:
        raise ValueError("it has a part of a number")
    return struct.unpack(f"{order}{count}{letter}", element.data)
