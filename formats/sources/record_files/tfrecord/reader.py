"""The reader of examples, each checked against its checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.columns.schema import Field
from shardprep.formats.sources.record_files.column_fields import column_name, encoded
from shardprep.formats.sources.record_files.files_reader import FilesReader
from shardprep.formats.system.foreign_file import foreign_file

from .example import NONE, Feature, byte_values, features, float_values, integer_values
from .frames import ADVICE, read_frame
from .wire import ByteWindow, window_of


class _Example(NamedTuple):
    """A record in memory."""

    window: ByteWindow
    features: Mapping[str, Feature]


@dataclass
class ExampleReader(FilesReader):
    """Reader of the examples in TFRecord files; ``image`` is the feature of the image, "" for none.

    An entry's offset is that of its frame.
    """

    image: str = ""
    _last: tuple[bytes, int, _Example] | None = field(default=None, init=False, repr=False, compare=False)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._last = None
        super().__exit__(kind, *rest)

    def read(self, entry: np.void) -> bytes:
        if not self.image:
            return b""
        window, found = self._example(entry)
        with foreign_file(self.where(entry), ADVICE, key=entry["key"].decode()):
            (image,) = byte_values(window, found.get(self.image, NONE))
            return window.take(image.start, image.end)

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        example = self._example(entry)
        named = {column_name(name): feature for name, feature in example.features.items()}
        return tuple(
            self._value(each, example.window, named.get(each.name, NONE), entry) for each in self.schema
        )

    def _value(self, column: Field, window: ByteWindow, feature: Feature, entry: np.void) -> bytes:
        place, key = self.where(entry), entry["key"].decode()
        with foreign_file(place, ADVICE, key=key, place=lambda: f"the column {column.name}: "):
            value = _READ[column.kind](window, feature)
        return encoded(column, value, path=place, key=key)

    def _example(self, entry: np.void) -> _Example:
        file = self.file_of(entry)
        path, offset = entry["path"].item(), int(entry["offset"])
        if self._last is None or self._last[:2] != (path, offset):
            data = read_frame(file, offset, int(entry["length"]))
            window = window_of(data)
            with foreign_file(self.where(entry), ADVICE, key=entry["key"].decode()):
                self._last = (path, offset, _Example(window, features(window, 0, len(data))))
        return self._last[2]


def _bytes(window: ByteWindow, feature: Feature) -> list[bytes]:
    return [window.take(value.start, value.end) for value in byte_values(window, feature)]


def _only(values: Any) -> Any:
    (value,) = values
    return value


_READ = {
    "bytes": lambda window, feature: _only(_bytes(window, feature)),
    "json": lambda window, feature: [value.decode() for value in _bytes(window, feature)],
    "int": lambda window, feature: int(_only(integer_values(window, feature))),
    "float": lambda window, feature: float(_only(float_values(window, feature))),
    "int64[*]": integer_values,
    "float32[*]": float_values,
}
