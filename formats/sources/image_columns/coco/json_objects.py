"""COCO's file of instances, read in pieces: one JSON object with lists of images, annotations, categories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardprep.formats.system.regular_file import ArchiveFile

MAX_OBJECT_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")


class CocoObject(NamedTuple):
    """An object of one of the lists: the name of the list, the object's offset in the file, and its value."""

    part: str
    offset: int
    value: dict[str, Any]


class JsonObjects:
    """The objects in the lists at the top of a JSON file, with their places.

    One object, at most MAX_OBJECT_BYTES, is in memory at a time. Raises ValueError for anything else than an
    object of lists of objects; other parts of it are passed over.
    """

    def __init__(self, file: ArchiveFile, parts: tuple[str, ...]) -> None:
        self._file = file
        self._parts = parts
        self._text = ""  # a character for each byte from ``_start``, so that places are those in the file
        self._start = 0
        self._at = 0

    def __iter__(self) -> Iterator[CocoObject]:
        self._start, self._at, self._text = 0, 0, ""
        self._expect("{")
        while self._next() != "}":
            name = self._value()
            self._expect(":")
            if name in self._parts and self._next() == "[":
                yield from self._list(name)
            else:
                self._value()
            if self._next() != "}":
                self._expect(",")

    def at(self, offset: int) -> dict[str, Any]:
        """Return the object at its place. Raises ValueError if there is none."""
        self._start, self._at, self._text = offset, 0, ""
        return self._object()

    @property
    def offset(self) -> int:
        """The place in the file of what is read next."""
        return self._start + self._at

    def _list(self, name: str) -> Iterator[CocoObject]:
        self._expect("[")
        while self._next() != "]":
            offset = self.offset
            yield CocoObject(name, offset, self._object())
            if self._next() != "]":
                self._expect(",")
        self._expect("]")

    def _object(self) -> dict[str, Any]:
        if self._next() != "{":
            raise ValueError("expected an object of JSON")
        value: dict[str, Any] = self._value()
        return value

    def _value(self) -> Any:
        """Return the value that is next, of any type."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_all:  # a number may go on
                    break
            except json.JSONDecodeError as error:
                if self._is_all:
                    raise ValueError(f"is not JSON: {error.msg}") from error
            if len(self._text) - self._at > MAX_OBJECT_BYTES:
                raise ValueError(f"has no value of JSON in {MAX_OBJECT_BYTES} bytes")
            self._read()
        raw, self._at = self._text[self._at : end], end
        return value if raw.isascii() else _DECODER.decode(raw.encode("latin-1").decode())

    def _expect(self, mark: str) -> None:
        if self._next() != mark:
            raise ValueError(f"expected {mark!r}, not {self._next()!r}")
        self._at += 1

    def _next(self) -> str:
        """Return the next character that is no space, and go there; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_all:
                return ""
            self._read()

    @property
    def _is_all(self) -> bool:
        return self._start + len(self._text) >= self._file.end

    def _read(self) -> None:
        """Read more, at least as much as is left."""
        left = self._text[self._at :]
        piece = self._file.read_at(max(PIECE_BYTES, len(left)), self._start + len(self._text))
        if not piece:
            raise ValueError("ends too early; copy it again")
        self._start, self._at, self._text = self._start + self._at, 0, left + piece.decode("latin-1")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
