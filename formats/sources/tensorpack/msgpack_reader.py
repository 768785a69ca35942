"""The reader of MessagePack with plain data and numpy's arrays, as msgpack-numpy writes them.

The msgpack package is not used: it copies every image and does not give its place, and is one more
dependency for 60 lines. Extension types and maps of anything else are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from .value import (
    Array,
    ByteRange,
    Element,
    NewList,
    Plain,
    Text,
    Value,
    unchanged,
)

FIRST_BYTES = tuple(bytes([code]) for code in (*range(0x81, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))  # maps and arrays

_MAX_DEPTH = 4  # of a datapoint, its array and the array's shape
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = dict(zip((*range(0xCA, 0xD0), *range(0xD0, 0xD4)), "fdBHIQbhiq", strict=True))
_ARRAY = {"nd", "type", "kind", "shape", "data"}


def unpack(
    value: Value,
    *,
    most: int,
    new_list: NewList = list,
    element: Element = unchanged,
    dicts: bool = False,
) -> Plain:
    """Return the plain data of the value, which has at most ``most`` items; ``dicts`` are read or refused.

    Raises ValueError, with what was found, if it is damaged or describes more than plain data.
    """
    reader = _Reader(value, most, new_list, element, dicts)
    plain: Plain = reader.item(0)
    if reader.at != value.length:
        raise ValueError("it is damaged: something follows its end")
    return plain


class _Reader:
    def __init__(self, value: Value, most: int, new_list: NewList, element: Element, dicts: bool) -> None:
        self.at, self._dicts = 0, dicts
        self._value, self._left = value, most
        self._new_list, self._element = new_list, element

    def item(self, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError("it has more items than an image with its label")
        code = self._number("B")
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        for first, last, read, mask in _SHORT:
            if first <= code <= last:
                return read(self, code & mask, depth)
        if code not in _LONG:
            raise ValueError(f"it is damaged, or of an extension type (0x{code:02x} at byte {self.at - 1})")
        read, layout = _LONG[code]
        return read(self, self._number(layout), depth)

    def _number(self, layout: str) -> Any:
        size = struct.calcsize(layout)
        return struct.unpack(">" + layout, self._value.read(self._skip(size), size))[0]

    def _skip(self, length: int) -> int:
        start = self.at
        if length > self._value.length - start:
            raise ValueError("it is cut off")
        self.at += length
        return start

    def _text(self, length: int, depth: int) -> Text:
        return Text(self._skip(length), length)

    def _bytes(self, length: int, depth: int) -> ByteRange:
        return ByteRange(self._skip(length), length)

    def _list(self, count: int, depth: int) -> Any:
        made = self._new_list()
        made.extend(self._element(self.item(depth + 1)) for _ in range(count))
        return made

    def _map(self, count: int, depth: int) -> Array | dict[str, Any]:
        """Read a map: an array or a scalar of numpy, or a dict with names as keys."""
        parts: dict[str, Any] = {}
        for _ in range(count):
            name = self._value.name(self.item(depth + 1))
            parts[name] = self.item(depth + 1)
        if self._dicts and "nd" not in parts:
            return parts
        if not {"nd", "type", "data"} <= parts.keys() <= _ARRAY:
            raise ValueError("it holds a dict")
        match parts.get("shape", []), parts.get("kind", ByteRange(0, 0)), parts["data"]:
            case list() as shape, ByteRange(length=0), ByteRange() as data:
                return Array(self._value.name(parts["type"]), tuple(shape), data)
        raise ValueError("it holds an array of more than plain numbers")


_Read = Callable[[_Reader, int, int], Any]
_SHORT: tuple[tuple[int, int, _Read, int], ...] = (
    (0x80, 0x8F, _Reader._map, 0x0F),
    (0x90, 0x9F, _Reader._list, 0x0F),
    (0xA0, 0xBF, _Reader._text, 0x1F),
)
_LONG: dict[int, tuple[_Read, str]] = {
    **{0xC4 + n: (_Reader._bytes, layout) for n, layout in enumerate("BHI")},
    **{0xD9 + n: (_Reader._text, layout) for n, layout in enumerate("BHI")},
    **{0xDC + n: (_Reader._list, layout) for n, layout in enumerate("HI")},
    **{0xDE + n: (_Reader._map, layout) for n, layout in enumerate("HI")},
}
