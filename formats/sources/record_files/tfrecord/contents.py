"""The contents of a split's files, as they are read record by record, without the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.schema import MAX_COLUMNS, Field, Schema
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.sources.listing.entry_table import GrowingTable
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.tree_files import wrapped
from shardprep.formats.sources.record_files.classes import NumberedClasses
from shardprep.formats.sources.record_files.column_fields import column_name
from shardprep.formats.sources.record_files.record_table import RecordTable
from shardprep.formats.sources.record_files.split_files import SplitFiles
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile

from .boxes import BOX, boxes_of
from .dialect import Dialect
from .example import (
    BYTES,
    FLOATS,
    INTEGERS,
    NONE,
    Feature,
    bounded,
    byte_values,
    features,
    integer_values,
    is_single,
    there,
)
from .frames import Frame, frames
from .wire import ByteWindow

ADVICE = "write the file again"
MAX_LABEL_BYTES = 4096  # of a list with a label, or with a name

_SINGLE = {BYTES: "bytes", FLOATS: "float", INTEGERS: "int"}
_LISTS = {BYTES: "json", FLOATS: "float32[*]", INTEGERS: "int64[*]"}


@dataclass
class _Column:
    """What the records so far have under a feature's name; ``records`` of them have exactly one value.

    ``if_empty`` is the kind of lists without values, which counts if there are no others.
    """

    kind: str = ""
    if_empty: str = ""
    records: int = 0


class ExampleContents:
    """The records so far, their labels, boxes and columns."""

    def __init__(self, files: SplitFiles, dialect: Dialect) -> None:
        self.problems = Problems()
        self.table = RecordTable(files.top, self.problems)
        self.classes = NumberedClasses()
        self._files = files
        self._dialect = dialect
        self._boxes = GrowingTable(BOX)
        self._columns: dict[str, _Column] = {}
        self._records = 0

    def read(self, name: str) -> None:
        """Read the records of a file. Raises SourceDamaged where no more of it can be read."""
        with ArchiveFile(self._files.top / name) as file:
            file.expect_random_reads()
            for frame in frames(file):
                with self.problems.collected("record"):
                    self._add(frame, name, file)

    def _add(self, frame: Frame, name: str, file: ArchiveFile) -> None:
        end = frame.data + frame.length
        window = ByteWindow(file.read_at, end)
        with foreign_file(f"{file.path}, byte {frame.start}", ADVICE):
            found = features(window, frame.data, end)
            boxes = boxes_of(window, found, self._dialect.first_label) if self._dialect.boxes else []
            self._add_columns(window, found)
            is_taken = self.table.append(
                self._name(window, found),
                self._label(window, found),
                length=frame.length,
                path=name,
                offset=frame.start,
                mtime_ns=wrapped(file.identity.mtime_ns),
            )
        if is_taken:
            for box in boxes:
                self._boxes.append((self._records, *box))
            self._records += 1

    def _name(self, window: ByteWindow, found: Mapping[str, Feature]) -> str:
        """Return the name of the image's file without its extension; "" for none."""
        if self._dialect.file_name not in found:
            return ""
        try:
            name = _text_in(window, found[self._dialect.file_name])
        except ValueError:
            return ""
        stem = name.rpartition("/")[2].rpartition(".")[0]
        return name[: name.rindex(".")] if stem else name

    def _label(self, window: ByteWindow, found: Mapping[str, Feature]) -> int:
        """Return the record's label, counted from 0."""
        dialect = self._dialect
        if not dialect.label:
            return UNLABELLED
        label = _label_in(window, there(found, dialect.label))
        if not dialect.class_name:
            return self.classes.add(label)
        name = _text_in(window, there(found, dialect.class_name))
        if label in (0, UNLABELLED) and not name:
            return UNLABELLED  # background, as the official scripts have it
        if label < dialect.first_label:
            raise ValueError(
                f"its {dialect.label} is {label}, but labels beside {dialect.class_name} begin with 1"
            )
        return self.classes.add(label - dialect.first_label, name)

    def _add_columns(self, window: ByteWindow, found: Mapping[str, Feature]) -> None:
        image = self._dialect.image
        if image and (found.get(image, NONE).kind != BYTES or not is_single(window, found[image])):
            raise ValueError(f"it has no image, or several, in the feature {image!r}")
        for name in found.keys() - self._dialect.no_columns:
            column = self._columns.setdefault(name, _Column())
            feature = found[name]
            if feature.is_empty:
                column.if_empty = column.if_empty or feature.kind
            elif column.kind in ("", feature.kind):
                column.kind = feature.kind
            else:
                other = f"has {feature.kind}, but {column.kind} in other records"
                raise ValueError(f"the feature {name!r} {other}")
            column.records += is_single(window, feature)
        if len(self._columns) > MAX_COLUMNS:
            raise ValueError(f"it has one more feature than the {MAX_COLUMNS} columns that are possible")

    def schema(self) -> Schema:
        """Return the columns: one value where all records have exactly one, and lists otherwise."""
        return Schema(self._fields())

    def _fields(self) -> Iterator[Field]:
        for name, column in sorted(self._columns.items()):
            kinds = _SINGLE if column.records == self._records else _LISTS
            yield Field(column_name(name), kinds[column.kind or column.if_empty or BYTES])

    def boxes(self) -> npt.NDArray[np.void] | None:
        """Return the boxes with the numbers of their records, dtype BOX; None if records have none."""
        return self._boxes.finish() if self._dialect.boxes and self._records else None


def _label_in(window: ByteWindow, feature: Feature) -> int:
    labels = integer_values(window, bounded(feature, MAX_LABEL_BYTES))
    if len(labels) != 1:
        raise ValueError(f"it has {len(labels)} labels, not one")
    return int(labels[0])


def _text_in(window: ByteWindow, feature: Feature) -> str:
    values = list(byte_values(window, bounded(feature, MAX_LABEL_BYTES)))
    if len(values) > 1:
        raise ValueError(f"it has {len(values)} names, not one")
    return window.take(values[0].start, values[0].end).decode() if values else ""
