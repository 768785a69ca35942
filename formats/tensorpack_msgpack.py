"""MessagePack of plain data, and of numpy's arrays as msgpack-numpy has them in it.

Its own reader and not the package's, which would copy every image to tell where it is, and is one more
dependency for 60 lines. Extension types and maps of anything else are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from .tensorpack_value import Array, Plain, Stretch, Text, Value

FIRST_BYTES = tuple(bytes([code]) for code in (*range(0x81, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))  # maps and arrays

_DEEPEST = 4  # a datapoint, its array, that one's shape
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = dict(zip((*range(0xCA, 0xD0), *range(0xD0, 0xD4)), "fdBHIQbhiq", strict=True))
_ARRAY = {"nd", "type", "kind", "shape", "data"}


def unpack(value: Value, *, most: int) -> Plain:
    """What the value describes, in at most ``most`` items.

    Raises ValueError, saying what was found, where it is damaged or describes more than plain data.
    """
    reader = _Reader(value, most)
    plain: Plain = reader.item(0)
    if reader.at != value.length:
        raise ValueError("it is damaged: something follows its end")
    return plain


class _Reader:
    def __init__(self, value: Value, most: int) -> None:
        self.at = 0
        self._value, self._left = value, most

    def item(self, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise ValueError("it has more in it than an image with its label needs")
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

    def _bytes(self, length: int, depth: int) -> Stretch:
        return Stretch(self._skip(length), length)

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.item(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> Array:
        """An array or a scalar of numpy; nothing else is a map here."""
        parts: dict[str, Any] = {}
        for _ in range(count):
            name = self._value.name(self.item(depth + 1))
            parts[name] = self.item(depth + 1)
        if not {"nd", "type", "data"} <= parts.keys() <= _ARRAY:
            raise ValueError("it holds a dict")
        match parts.get("shape", []), parts.get("kind", Stretch(0, 0)), parts["data"]:
            case list() as shape, Stretch(length=0), Stretch() as data:
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
