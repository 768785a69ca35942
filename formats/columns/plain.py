"""Values that are bytes or text: encoded images, bytes, text and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardprep.formats.errors import BadImage
from shardprep.formats.images.header import read_image_header

from .codec import BadValue, Codec, bounded, refused


@dataclass(frozen=True)
class BytesCodec(Codec):
    """Any bytes, as they are."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise refused(value, "bytes")
        return bounded(bytes(value))

    def decode(self, data: bytes) -> bytes:
        return data


@dataclass(frozen=True)
class ImageCodec(BytesCodec):
    """The bytes of image files, unchanged, of which the header is read."""

    def encode(self, value: Any) -> bytes:
        data = super().encode(value)
        try:
            read_image_header(data)
        except BadImage as error:
            raise BadValue(error.message) from error
        return data


@dataclass(frozen=True)
class TextCodec(Codec):
    """Text as UTF-8."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise refused(value, "text")
        try:
            return bounded(value.encode())
        except UnicodeEncodeError as error:
            raise BadValue("is not Unicode text: it has surrogates") from error

    def decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadValue("is not UTF-8") from error


@dataclass(frozen=True)
class JsonCodec(Codec):
    """Values of JSON: None, booleans, numbers, text, lists, and dicts with text as keys.

    Dicts keep their order. NaN, infinities, tuples and other objects are refused: they would not come back
    as they were.
    """

    def encode(self, value: Any) -> bytes:
        _check(value)
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            return bounded(text.encode())
        except (ValueError, RecursionError) as error:
            raise BadValue(f"is not JSON: {error}") from error

    def decode(self, data: bytes) -> Any:
        try:
            return json.loads(data.decode(), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadValue(f"is not JSON: {error}") from error


def _check(value: object) -> None:
    """Raise BadValue for what JSON would turn into something else, such as a tuple into a list."""
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) is dict:
            if not all(type(name) is str for name in item):
                raise refused(item, "a dict with text as keys")
            pending.extend(item.values())
        elif type(item) is list:
            pending.extend(item)
        elif item is not None and type(item) not in (bool, int, float, str):
            raise refused(item, "a value of JSON")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
