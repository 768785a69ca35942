"""The source of Parquet files of Hugging Face's datasets, read in place."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, foreign_file
from shardprep.formats.runtime.workers import Child, ChildDied
from shardprep.formats.sources.listing import official_key
from shardprep.formats.sources.parquet_rows import (
    Columns,
    RowGroups,
    arrow_reads,
    image_of,
    no_bytes,
    objects_of,
    opened,
    parquet_module,
    sizes_of,
    value_of,
)
from shardprep.formats.sources.record_files import (
    FilesReader,
    RecordContents,
    RecordSource,
    chosen,
    column_name,
    naming_source,
    split_files,
    usual_image,
    usual_label,
)
from shardprep.formats.sources.source import Problems, SourceOptions
from shardprep.formats.sources.trees import wrapped

_IMAGES, _LABELS = ("image", "img"), ("label", "labels")
_BINARY = ("binary", "large_binary")
_TEXT = ("string", "large_string")
_AS_TEXT = ("timestamp", "date", "time", "decimal")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = {"float": "float32", "double": "float64", "halffloat": "float16"}
_NUMBERS = (*_INTEGERS, *_FLOATS)
_LISTS = ("list<", "large_list<", "fixed_size_list<")
_FILE = re.compile(r".+\.parquet", re.DOTALL)

MAX_KEPT_BYTES = 256 << 20  # of row groups, and at least one of them
_ROWS_OF_NO_BYTES = 1 << 20  # more of them than bytes are no records
_MOST_SHARED = 4  # times the bytes of a file: more are counted row by row
_SMALL = 32 << 20
_MOST_BYTES = 4 * MAX_IMAGE_BYTES  # of a row with its columns


def parquet(path: Path, split: str | None, options: SourceOptions) -> ParquetRows | None:
    """Return the source of the Parquet files at a path, or in the folder there; None if there are none.

    Raises UsageError, also without the library pyarrow, and OSError.
    """
    files = split_files(path, split, _FILE, follow_symlinks=options.follow_symlinks)
    if files is None:
        return None
    parquet_module(path)
    return ParquetRows(files, options)


METADATA_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ParquetRows(RecordSource):
    """Rows of Parquet files.

    A record's key is the path of its image, where each row has one and no two the same; else the file and the
    number of its row.
    """

    LAYOUT: ClassVar[str] = "parquet"

    def contents(self, split: str) -> RowContents:
        problems = Problems()
        layout = self._layout(split, problems)
        contents = RowContents(self.files.top, layout)
        with problems.collected(), arrow_reads(self.files.top / self.files.of_split[split][0]):
            for label, class_name in enumerate(layout.classes):
                contents.classes.add(label, class_name)
        contents.problems.merge(problems)
        contents.is_readable = not problems
        return contents

    def _layout(self, split: str, problems: Problems) -> ParquetLayout:
        """Return the layout of a split's files; one that cannot be read, or has another, is a problem."""
        schema, first, nullable = None, "", set[str]()
        with Child() as child:
            for name in self.files.of_split[split]:
                path = self.files.top / name
                with problems.collected():
                    nullable |= set(_null_columns(child, path))
                    with ArchiveFile(path) as archive, arrow_reads(path), opened(archive) as file:
                        if schema is None:
                            schema, first = file.schema_arrow, name
                        elif not schema.equals(file.schema_arrow, check_metadata=True):
                            raise SourceDamaged(
                                f"has different columns from {first}; put them into two folders", path=path
                            )
        if schema is None:
            return ParquetLayout("", False, "", (), {})
        path = self.files.top / first
        with (
            naming_source(path),
            ArchiveFile(path) as archive,
            arrow_reads(path),
            closing(RowGroups(archive)) as groups,
        ):
            return layout_of(schema, frozenset(nullable), self.source_options, groups.first)


def _null_columns(child: Child, path: Path) -> list[str]:
    """Return the columns with nulls. Damaged metadata make pyarrow abort the process that reads them."""
    try:
        return child.call_within(METADATA_TIMEOUT_S, _with_nulls, path)
    except ChildDied as error:
        message = f"has damaged metadata, on which pyarrow crashes with {error.signal}; write it again"
        raise SourceDamaged(message, path=path) from error


def _with_nulls(path: Path) -> list[str]:
    found: dict[str, None] = {}
    with ArchiveFile(path) as archive, arrow_reads(path), opened(archive) as file:
        file.metadata.to_dict()  # all that is read of it later
        for group in range(file.metadata.num_row_groups):
            for number in range(file.metadata.num_columns):
                chunk = file.metadata.row_group(group).column(number)
                statistics = chunk.statistics if chunk.is_stats_set else None
                if statistics is not None and statistics.has_null_count and statistics.null_count:
                    found[chunk.path_in_schema] = None
    return list(found)


@dataclass(frozen=True)
class ParquetLayout:
    """The columns with image and label, "" for none; the names of its classes; the columns beside them.

    ``fields`` maps the other columns of the file to fields. With ``in_struct`` an image has bytes
    and path.
    """

    image: str
    in_struct: bool
    label: str
    classes: tuple[str, ...]
    fields: Mapping[str, Field]

    @property
    def names(self) -> list[str]:
        """The names of all columns in the file."""
        return [name for name in (self.image, self.label, *self.fields) if name]

    @cached_property
    def name_of(self) -> Mapping[str, str]:
        """The names in the file of the other columns, by those of their fields."""
        return {field.name: name for name, field in self.fields.items()}


def layout_of(
    schema: Any, nullable: frozenset[str], options: SourceOptions, first: Callable[[str], Any]
) -> ParquetLayout:
    """Return the layout of a pyarrow schema; ``nullable`` are the columns with nulls.

    ``first`` returns the value of a column in the first row. Raises ValueError, and UsageError for columns in
    the ``options`` that cannot be taken.
    """
    info = (schema.metadata or {}).get(b"huggingface")  # the features of the library datasets
    features = json.loads(info)["info"]["features"] if info else {}
    if not isinstance(features, dict):
        raise ValueError("its Hugging Face features are not a mapping")
    names: list[str] = schema.names
    if len(set(names)) < len(names):
        raise ValueError("two columns have one name")
    kinds = {}
    for name in names:
        kind = schema.field(name).type
        kinds[name] = str(kind.value_type if str(kind).startswith("dictionary<") else kind)
    classes = {name: found for name in names if (found := _classes(features.get(name))) is not None}
    images = [name for name in names if _is_image(kinds[name], features.get(name))]
    able = [*images, *(name for name in names if kinds[name] in _BINARY)]
    if options.image_column is not None:
        image = _able(kinds, options.image_column, "--image-column", able, "images are bytes")
    else:
        known = [name for name in _IMAGES if name in able]
        image = next(iter((*known, *images)), "") or usual_image(able, first)
    integers = [name for name in names if kinds[name] in _INTEGERS]
    if options.label_column is not None:
        texts = [name for name in names if kinds[name] in (*_TEXT, *_BINARY) and name != image]
        able, needs = [*integers, *texts], "labels are integers or text"
        label = _able(kinds, options.label_column, "--label-column", able, needs)
    else:
        known = [name for name in _LABELS if name in (*integers, *classes)]
        label = next(iter((*known, *classes)), "") or usual_label(integers, first)
    return ParquetLayout(
        image=image,
        in_struct=image in images,
        label=label,
        classes=classes.get(label, ()),
        fields={
            name: _field(name, schema.field(name).type, features.get(name), nullable)
            for name in names
            if name not in (image, label)
        },
    )


def _able(kinds: Mapping[str, str], wanted: str, option: str, able: Collection[str], needs: str) -> str:
    """Return the column that the user means. Raises UsageError for one that is not ``able``."""
    name = chosen(kinds, wanted, option)
    if name and name not in able:
        raise UsageError(f"the column {name} has {kinds[name]}, but {needs}")
    return name


def _is_image(kind: str, feature: Any) -> bool:
    """Whether a column has bytes and paths of images."""
    says = not isinstance(feature, dict) or feature.get("_type", "Image") == "Image"
    return says and kind in (f"struct<bytes: {binary}, path: string>" for binary in _BINARY)


def _classes(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a ClassLabel; None for any other feature. Raises ValueError."""
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its class names are not a list of text")
    return tuple(names)


def _field(name: str, kind: Any, feature: Any, nullable: frozenset[str]) -> Field:
    """Return the column beside image and label; JSON for values of no other kind, and nulls."""
    text, of_column = str(kind), "json"
    if _is_image(text, feature):
        of_column = "image"
    elif text in _BINARY:
        of_column = "bytes"
    elif name in nullable:
        of_column = "json"
    elif (classes := _classes(feature)) and text in _NUMBERS:
        return Field(column_name(name), "label", classes)
    elif text in _INTEGERS:
        of_column = "int"
    elif text in _FLOATS:
        of_column = "float"
    elif text in _TEXT or text.startswith(_AS_TEXT):
        of_column = "text"
    elif text == "bool":
        of_column = "bool[]"
    elif text.startswith(_LISTS) and (element := str(kind.value_type)) in (*_NUMBERS, "bool"):
        size = kind.list_size if text.startswith("fixed") else "*"
        of_column = f"{_FLOATS.get(element, element)}[{size}]"
    return Field(column_name(name), of_column)


class RowContents(RecordContents):
    """The rows so far, with their sizes."""

    is_readable = True

    def __init__(self, top: Path, layout: ParquetLayout) -> None:
        super().__init__(top)
        self._layout = layout
        self._rows = self._file_bytes = self._bytes = self._encoded_bytes = 0

    def columns(self) -> tuple[Schema, bool]:
        return Schema(self._layout.fields.values()), bool(self._layout.image)

    def reader(self) -> RowReader:
        return RowReader(self.top, self.schema, self._layout)

    def read(self, name: str) -> None:
        """Read labels, paths and sizes of a file's rows. Raises SourceDamaged."""
        if not self.is_readable:
            return
        path = self.top / name
        with ArchiveFile(path) as archive, arrow_reads(path), closing(RowGroups(archive)) as groups:
            rows = groups.starts[-1]
            self._rows, self._file_bytes = self._rows + rows, self._file_bytes + archive.end
            if self._rows > max(_ROWS_OF_NO_BYTES, self._file_bytes):  # a few bytes may claim billions
                raise SourceDamaged(
                    f"claims {rows:,} rows in {archive.end:,} bytes, less than a byte for each",
                    path=path,
                )
            mtime_ns = wrapped(archive.identity.mtime_ns)
            for group, first in enumerate(groups.starts[:-1]):
                columns = groups.read(group, self._layout.names)
                self._add_group(columns, groups.encoded_bytes(group), name, first, mtime_ns)

    def _add_group(self, columns: Columns, encoded: int, name: str, first: int, mtime_ns: int) -> None:
        layout = self._layout
        rows = len(next(iter(columns.values()), ()))
        images, paths = _images(columns, layout, rows)
        labels = objects_of(columns[layout.label]) if layout.label else repeat(None, rows)
        lengths = self._lengths(columns, np.array([size or 0 for size in images], np.int64), encoded)
        every = zip(labels, images, paths, lengths.tolist(), strict=True)
        for row, (label, size, path, length) in enumerate(every, first):
            place = f"{self.top / name}, row {row}"
            with self.problems.collected("row"), foreign_file(place, "write the file again"):
                if size is None:
                    raise no_bytes(path)
                self.append(
                    _name(path), self._label(label), length=length, path=name, offset=row, mtime_ns=mtime_ns
                )

    def _lengths(
        self, columns: Columns, images: npt.NDArray[np.int64], encoded: int
    ) -> npt.NDArray[np.int64]:
        """Return the bytes of each row: its image and its share of the bytes of all other columns.

        Where that is far too little, because values are repeated, they are counted.
        """
        rows = len(images)
        lengths = images + min(max(0, encoded - int(images.sum())) // max(1, rows), _MOST_BYTES)
        counted = sum(map(sizes_of, columns.values()), np.zeros(rows, np.int64))
        self._bytes += int(counted.sum())
        self._encoded_bytes += int(lengths.sum())
        is_shared = self._bytes > max(_SMALL, _MOST_SHARED * self._encoded_bytes)
        return counted if is_shared else np.where(counted > _MOST_BYTES, counted, lengths)

    def _label(self, label: int | str | bytes | None) -> int:
        if label is None:
            return UNLABELLED
        if isinstance(label, str | bytes):
            return self.classes.add_text(label)
        if self._layout.classes and label >= len(self._layout.classes):
            raise ValueError(f"has the label {label}, but there are {len(self._layout.classes)} classes")
        return self.classes.add(label)


def _images(
    columns: Columns, layout: ParquetLayout, rows: int
) -> tuple[list[int | None], Iterable[str | None]]:
    """Return the size of each image, None without bytes, and its path, None for none."""
    import pyarrow.compute  # optional, and slow to import

    if not layout.image:
        return [0] * rows, repeat(None, rows)
    images: Any = columns[layout.image]
    paths: Iterable[str | None] = repeat(None, rows)
    if layout.in_struct:
        paths = objects_of(pyarrow.compute.struct_field(images, "path"))
        images = pyarrow.compute.struct_field(images, "bytes")
    has_bytes = images.is_valid().to_pylist()
    return [
        size if there else None for size, there in zip(sizes_of(images).tolist(), has_bytes, strict=True)
    ], paths


def _name(path: str | None) -> str:
    """Return the name for the row's key: that of an image of ILSVRC12 without extension."""
    stem = (path or "").rpartition(".")[0]
    return stem if official_key(stem.rpartition("/")[2]) else path or ""


@dataclass
class RowReader(FilesReader):
    """Reader of the rows of Parquet files. An entry's offset is the number of its row."""

    layout: ParquetLayout

    def open_in(self, archive: ArchiveFile, context: ExitStack) -> RowGroups:
        with arrow_reads(archive.path):
            return context.enter_context(closing(RowGroups(archive)))

    def where(self, entry: np.void) -> str:
        return f"{self.path_of(entry)}, row {entry['offset']}"

    def read(self, entry: np.void) -> bytes:
        if not self.layout.image:
            return b""
        with arrow_reads(self.where(entry), key=entry["key"].decode()):
            group, row = self.record(entry)
            return image_of(group[self.layout.image][row].as_py())

    def value(self, column: Field, record: tuple[Columns, int], entry: np.void) -> Any:
        group, row = record
        return value_of(group[self.layout.name_of[column.name]][row].as_py(), column)

    def record(self, entry: np.void) -> tuple[Columns, int]:
        """Return the row group of the entry, and its row in it; row groups are kept, and not the record."""
        return self.record_in(self.file_of(entry), entry)

    def record_in(self, file: RowGroups, entry: np.void) -> tuple[Columns, int]:
        kept, number = self.opened.kept, int(entry["offset"])
        group = bisect_right(file.starts, number) - 1
        if group >= len(file.starts) - 1:
            raise self.changed(entry)
        place = (entry["path"].item(), group)
        if place not in kept:
            with arrow_reads(self.path_of(entry)):
                columns = [name for name in (self.layout.image, *self.layout.fields) if name]
                kept[place] = file.read(group, columns)
            while len(kept) > 1 and sum(map(_bytes_of, kept.values())) > MAX_KEPT_BYTES:
                kept.popitem(last=False)
        kept.move_to_end(place)
        return kept[place], number - file.starts[group]


def _bytes_of(columns: Columns) -> int:
    return sum(column.nbytes for column in columns.values())
