"""The reader of rows, by row groups that are kept for the next rows."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.columns.schema import Field
from shardprep.formats.sources.record_files.column_fields import encoded
from shardprep.formats.sources.record_files.files_reader import FilesReader

from .layout import ParquetLayout
from .library import arrow_reads, opened, read_group
from .row_values import image_of, value_of

MAX_KEPT_BYTES = 256 << 20  # of row groups, and at least one of them


class _OpenParquet(NamedTuple):
    """An open file, and the number of the first row of each group, and of the row after the last."""

    file: Any
    starts: tuple[int, ...]


class _Kept:
    """The open files, and the row groups that were read last."""

    def __init__(self) -> None:
        self.files: dict[bytes, _OpenParquet] = {}
        self.groups: OrderedDict[tuple[bytes, int], Any] = OrderedDict()

    def add(self, place: tuple[bytes, int], table: Any) -> None:
        """Keep a row group in place of those that were not used for longest."""
        self.groups[place] = table
        while len(self.groups) > 1 and sum(each.nbytes for each in self.groups.values()) > MAX_KEPT_BYTES:
            self.groups.popitem(last=False)


@dataclass
class RowReader(FilesReader):
    """Reader of the rows of Parquet files. An entry's offset is the number of its row."""

    layout: ParquetLayout | None = None
    _kept: _Kept | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> RowReader:
        self._kept = _Kept()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        kept, self._kept = self._kept, None
        for each in kept.files.values() if kept else ():
            each.file.close()
        super().__exit__(kind, *rest)

    def where(self, entry: np.void) -> str:
        return f"{self.path_of(entry)}, row {entry['offset']}"

    def read(self, entry: np.void) -> bytes:
        layout = self._layout
        if not layout.image:
            return b""
        with arrow_reads(self.where(entry), key=entry["key"].decode()):
            group, row = self._row(entry)
            return image_of(group.column(layout.image)[row].as_py())

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        group, row = self._row(entry)
        named = self._layout.fields.items()
        return tuple(self._value(name, each, group, row, entry) for name, each in named)

    def _value(self, name: str, column: Field, group: Any, row: int, entry: np.void) -> bytes:
        place, key = self.where(entry), entry["key"].decode()
        with arrow_reads(place, key=key, column=name):
            value = value_of(group.column(name)[row].as_py(), column)
        return encoded(column, value, path=place, key=key)

    @property
    def _layout(self) -> ParquetLayout:
        if self.layout is None:
            raise ValueError("the reader has no layout")
        return self.layout

    def _row(self, entry: np.void) -> tuple[Any, int]:
        """Return the row group of the entry, and its row in it."""
        if self._kept is None:
            raise ValueError("the reader is closed")
        file, starts = self._parquet(entry, self._kept)
        number = int(entry["offset"])
        group = bisect_right(starts, number) - 1
        if group >= len(starts) - 1:
            raise self.changed(entry)
        place = (entry["path"].item(), group)
        if place not in self._kept.groups:
            with arrow_reads(self.path_of(entry)):
                columns = [name for name in (self._layout.image, *self._layout.fields) if name]
                self._kept.add(place, read_group(file, group, columns))
        self._kept.groups.move_to_end(place)
        return self._kept.groups[place], number - starts[group]

    def _parquet(self, entry: np.void, kept: _Kept) -> _OpenParquet:
        self.file_of(entry)  # it is the file that was listed, and will be when the reader is left
        path = entry["path"].item()
        if path not in kept.files:
            file = opened(self.path_of(entry))
            metadata = file.metadata
            rows = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
            kept.files[path] = _OpenParquet(file, tuple(accumulate(rows, initial=0)))
        return kept.files[path]
