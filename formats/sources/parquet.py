"""The source of Hugging Face's Parquet files, read in place, one row group at a time."""

from __future__ import annotations

import json
import math
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.errors import MissingExtra, SourceDamaged, UsageError
from shardprep.formats.records.record import UNLABELLED
from shardprep.formats.records.schema import ArrayCodec, BadValue, Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, errors_as_damage
from shardprep.formats.runtime.owners import Owner
from shardprep.formats.runtime.processes import ChildDied, WorkerPool
from shardprep.formats.sources.listing import Classes, official_key
from shardprep.formats.sources.record_files import (
    ADVICE,
    FilesReader,
    RecordContents,
    RecordSource,
    SplitFiles,
    column_name,
    find_split_files,
    guess_image,
    guess_label,
    name_source_in_errors,
    resolve_name,
)
from shardprep.formats.sources.source import Problems, SourceOptions

_IMAGES, _LABELS = ("image", "img"), ("label", "labels")
_BINARY = ("binary", "large_binary", "binary_view")
_TEXT = ("string", "large_string", "string_view")
_BYTES, _PATH = f"bytes: ({'|'.join(_BINARY)})", f"path: ({'|'.join(_TEXT)}|null)"
_IMAGE = re.compile(f"struct<({_BYTES}, {_PATH}|{_PATH}, {_BYTES})>")
_AS_TEXT = ("timestamp", "date", "time", "decimal")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = {"float": "float32", "double": "float64", "halffloat": "float16"}
_NUMBERS = (*_INTEGERS, *_FLOATS)
_LISTS = ("list<", "large_list<", "fixed_size_list<")
_FILE = re.compile(r".+\.parquet", re.DOTALL)
MAX_KEPT_BYTES = 256 << 20  # of row groups; at least one is kept
_MAX_SHARED = 4  # ratio of bytes in memory to encoded bytes, above which values count as repeated
_SMALL = 32 << 20
_MAX_METADATA = 16 << 20
_MAX_ITEMS = 1 << 18  # of a list in the metadata; pyarrow allocates as many as the file claims
MAX_GROUP_BYTES = 1 << 30  # of a row group, by its metadata
Columns = Mapping[str, Any]
"""Columns of a row group by name, each a pyarrow ``ChunkedArray``."""


def import_arrow(path: Path | None = None) -> Any:
    """Return pyarrow with its Parquet, which ``path`` needs. Raises MissingExtra if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra.of("Parquet", "pyarrow", "parquet", path=path) from error
    return pyarrow


@contextmanager
def arrow_errors_as_damage(place: str | Path, *, key: str | None = None) -> Iterator[None]:
    """Raise SourceDamaged for pyarrow's errors about a file, including an OSError without errno."""
    with errors_as_damage(place, ADVICE, key=key):
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise ValueError(str(error)) from error
            raise


def open_parquet(archive: ArchiveFile) -> Any:
    """Open a ``ParquetFile`` and read its metadata. Raises SourceDamaged, MissingExtra."""
    parquet = import_arrow(archive.path).parquet
    with arrow_errors_as_damage(archive.path):
        length, mark = struct.unpack("<I4s", archive.read_at(8, max(0, archive.end - 8)).rjust(8, b"\0"))
        if mark == b"PARE":
            raise SourceDamaged("is encrypted; write it without encryption", path=archive.path)
        if mark != b"PAR1":
            raise ValueError("is not a Parquet file, or is truncated: it does not end with PAR1")
        if length > _MAX_METADATA:
            raise ValueError(f"has {length} bytes of metadata, more than {_MAX_METADATA}")
        return parquet.ParquetFile(
            archive.path, thrift_string_size_limit=_MAX_METADATA, thrift_container_size_limit=_MAX_ITEMS
        )


class RowGroups(Owner):
    """The row groups of an open file; ``starts`` are their first row numbers, and last the number of rows.

    ``encoded_bytes`` are the decompressed sizes of the groups by the metadata.
    """

    def __init__(self, archive: ArchiveFile) -> None:
        self._path = archive.path
        self._file = open_parquet(archive)
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.starts = tuple(accumulate((group.num_rows for group in groups), initial=0))
        self.encoded_bytes = [group.total_byte_size for group in groups]

    def close(self) -> None:
        self._file.close()

    def first_value(self, name: str) -> Any:
        """Return a column's value in the first row; None without rows."""
        for batch in self._file.iter_batches(1, columns=[name], use_threads=False):
            if len(batch):
                return batch.column(0)[0].as_py()
        return None

    def read(self, group: int, names: Sequence[str]) -> Columns:
        """Read columns of a row group. Raises SourceDamaged if it is too large, ValueError."""
        if self.encoded_bytes[group] > MAX_GROUP_BYTES:
            too_large = f"the row group {group} has more than {MAX_GROUP_BYTES:,} bytes"
            raise SourceDamaged(f"{too_large}; write smaller row groups", path=self._path)
        table = self._file.read_row_group(group, columns=list(names), use_threads=False)
        rows = self.starts[group + 1] - self.starts[group]
        if len(table) != rows:
            raise ValueError(f"the row group {group} has {len(table)} rows, but says {rows}")
        return {name: table.column(name) for name in names}


def no_bytes_error(path: object) -> ValueError:
    """Return the error for an image that is null or only a path."""
    if path is None:
        return ValueError("has no image")
    return ValueError(f"has only the path of the image, {str(path)[:200]!r}, not its bytes; embed the images")


def image_bytes(value: Any) -> bytes:
    """Return the bytes of an image, given with or without its path. Raises ValueError if there are none."""
    path = None
    if isinstance(value, dict):
        value, path = value.get("bytes"), value.get("path")
    if not isinstance(value, bytes):
        raise no_bytes_error(path)
    return value


def convert_value(value: Any, field: Field) -> Any:
    """Convert a value for its column. Raises BadValue, ValueError or TypeError for an unsuitable one."""
    if field.kind == "image":
        return image_bytes(value)
    if field.kind == "label":
        return UNLABELLED if value is None else value
    if field.kind in ("json", "text"):
        return _to_plain(value)
    if field.kind == "float":
        return math.nan if value is None else value
    if isinstance(field.codec, ArrayCodec):
        is_float = field.codec.elements.kind == "f"
        if value is None or (not is_float and isinstance(value, list) and None in value):
            raise BadValue(f"has a null in place of {'a list' if value is None else 'an element'}")
        array = np.array(value, field.codec.elements)
        return array if array.shape else array[()]
    return value


def _to_plain(value: Any) -> Any:
    """Convert times and decimals in a value to text, the pairs of a map to lists, and NaN to None."""
    if isinstance(value, dict):
        return {name: _to_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else str(value)


def recognise_parquet(
    path: Path, split: str | None, options: SourceOptions, *, beside: SplitFiles | None = None
) -> ParquetRows | None:
    """Return the source of a Parquet file or a folder of them, else None. Raises UsageError, OSError.

    Files with the names of the tars or TFRecords ``beside`` them are img2dataset's descriptions of these.
    """
    files = find_split_files(path, split, _FILE, follow_symlinks=options.follow_symlinks)
    if files is None or (beside and files.stems <= beside.stems):
        return None
    import_arrow(path)
    return ParquetRows(files, options)


@dataclass(frozen=True)
class RowLayout:
    """The columns of image and label, "" for none, and the ``fields`` of the file's other columns."""

    image: str
    in_struct: bool  # of bytes and path
    label: str
    classes: tuple[str, ...]
    fields: Mapping[str, Field]

    @cached_property
    def name_of(self) -> Mapping[str, str]:
        """The file's names of the other columns, by field name."""
        return {field.name: name for name, field in self.fields.items()}


def detect_layout(
    schema: Any, nullable: frozenset[str], options: SourceOptions, first: Callable[[str], Any]
) -> RowLayout:
    """Return the layout of a pyarrow schema; ``nullable`` are the columns with nulls.

    ``first`` returns a column's value in the first row. Raises ValueError, and UsageError for unsuitable
    columns in the ``options``.
    """
    info = (schema.metadata or {}).get(b"huggingface")  # the features of the datasets library
    features = json.loads(info)["info"]["features"] if info else {}
    names: list[str] = schema.names
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    types = {name: schema.field(name).type for name in names}
    for name, kind in types.items():
        if str(kind).startswith("dictionary<"):
            types[name] = kind.value_type
    kinds = {name: str(kind) for name, kind in types.items()}
    classes = {name: found for name in names if (found := _class_names(features.get(name))) is not None}
    images = [name for name in names if _is_image(kinds[name], features.get(name))]
    fit = [*images, *(name for name in names if kinds[name] in _BINARY)]
    if options.image_column is not None:
        image = _choose(kinds, options.image_column, "--image-column", fit, "images are bytes")
    else:
        named = [name for name in _IMAGES if name in fit]
        image = next(iter((*named, *images)), "") or guess_image(fit, first)
    integers = [name for name in names if kinds[name] in _INTEGERS]
    if options.label_column is not None:
        texts = [name for name in names if kinds[name] in (*_TEXT, *_BINARY) and name != image]
        fit, needs = [*integers, *texts], "labels are integers or text"
        label = _choose(kinds, options.label_column, "--label-column", fit, needs)
    else:
        named = [name for name in _LABELS if name in (*integers, *classes)]
        label = next(iter((*named, *classes)), "") or guess_label(integers, first)
    return RowLayout(
        image=image,
        in_struct=image in images,
        label=label,
        classes=classes.get(label, ()),
        fields={
            name: _column_field(name, types[name], features.get(name), nullable)
            for name in names
            if name not in (image, label) and options.takes(column_name(name))
        },
    )


def _choose(kinds: Mapping[str, str], wanted: str, option: str, fit: Collection[str], needs: str) -> str:
    """Return the column chosen by the user. Raises UsageError for one that does not ``fit``."""
    name = resolve_name(kinds, wanted, option)
    if name and name not in fit:
        raise UsageError(f"the column {name} has {kinds[name]}, but {needs}")
    return name


def _is_image(kind: str, feature: Any) -> bool:
    """Whether a column has images as structs of bytes and path."""
    says = not isinstance(feature, dict) or feature.get("_type", "Image") == "Image"
    return says and _IMAGE.fullmatch(kind) is not None


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a ClassLabel; None for any other feature. Raises ValueError."""
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its class names are not a list of text")
    return tuple(names)


def _column_field(name: str, kind: Any, feature: Any, nullable: frozenset[str]) -> Field:
    """Return the field of a column beside image and label; JSON for nulls that no kind holds."""
    text, of_column, classes = str(kind), "json", _class_names(feature)
    if _is_image(text, feature):
        of_column = "image"
    elif text in _BINARY or text.startswith("fixed_size_binary["):
        of_column = "bytes"
    elif text in _FLOATS and not classes:
        of_column = "float"
    elif name in nullable:
        pass
    elif classes and text in _NUMBERS:
        return Field(column_name(name), "label", classes)
    elif text in _INTEGERS:
        of_column = "int"
    elif text in _TEXT or text.startswith(_AS_TEXT):
        of_column = "text"
    elif text == "bool":
        of_column = "bool[]"
    elif text.startswith(_LISTS):
        of_column = _list_kind(kind, feature)
        if "," in of_column and any(path.startswith(f"{name}.") for path in nullable):
            of_column = "json"
    if of_column == "json" and "binary" in text:
        advice = "choose other columns with --column, or save the rows with write_dataset, in Python"
        raise UsageError(f"the column {name} has bytes within {text}; {advice}")
    return Field(column_name(name), of_column)


def _list_kind(kind: Any, feature: Any) -> str:
    """Return the kind of a column of lists: arrays of numbers, nested only with a fixed shape, or json."""
    sizes: list[Any] = []
    while (text := str(kind)).startswith(_LISTS):
        sizes.append(kind.list_size if text.startswith("fixed") else "*")
        kind = kind.value_type
    if isinstance(feature, dict) and str(feature.get("_type")).startswith("Array"):  # Array2D to Array5D
        sizes = [size or "*" for size in feature["shape"]]
    if (sizes[1:] and "*" in sizes) or text not in (_NUMBERS if sizes[1:] else (*_NUMBERS, "bool")):
        return "json"
    return f"{_FLOATS.get(text, text)}[{','.join(map(str, sizes))}]"


class RowReader(FilesReader):
    """Reader of the rows of Parquet files. An entry's offset is the number of its row."""

    def open_file(self, archive: ArchiveFile, context: ExitStack) -> RowGroups:
        with arrow_errors_as_damage(archive.path):
            return context.enter_context(closing(RowGroups(archive)))

    def location_of(self, entry: np.void) -> str:
        return f"{self.path_of(entry)}, row {entry['offset']}"

    def read(self, entry: np.void) -> bytes:
        if not self.layout.image:
            return b""
        with arrow_errors_as_damage(self.location_of(entry), key=entry["key"].decode()):
            group, row = self.record(entry)
            value = group[self.layout.image][row].as_py()
            is_null = not any(value.values()) if isinstance(value, dict) else value is None
            return b"" if is_null else image_bytes(value)  # an empty image is a bad one

    def value(self, column: Field, record: tuple[Columns, int], entry: np.void) -> Any:
        group, row = record
        return convert_value(group[self.layout.name_of[column.name]][row].as_py(), column)

    def record(self, entry: np.void) -> tuple[Columns, int]:
        """Return the entry's row group and its row in it; row groups are cached instead of records."""
        return self.read_record(self.file_of(entry), entry)

    def read_record(self, file: RowGroups, entry: np.void) -> tuple[Columns, int]:
        groups, number = self.resource.records, int(entry["offset"])
        group = bisect_right(file.starts, number) - 1
        place = (entry["path"].item(), group)
        if place not in groups:
            with arrow_errors_as_damage(self.path_of(entry)):
                columns = file.read(group, [*filter(None, (self.layout.image, *self.layout.fields))])
            groups[place] = columns, _memory_size(columns)
            self.resource.record_bytes += groups[place][1]
            while len(groups) > 1 and self.resource.record_bytes > MAX_KEPT_BYTES:
                self.resource.record_bytes -= groups.popitem(last=False)[1][1]
        groups.move_to_end(place)
        return groups[place][0], number - file.starts[group]


def _memory_size(columns: Columns) -> int:
    return sum(column.nbytes for column in columns.values())


class RowContents(RecordContents):
    READER = RowReader
    _bytes = _encoded_bytes = 0

    def columns(self) -> tuple[Schema, bool]:
        layout = self.layout
        if self._bytes <= MAX_KEPT_BYTES:
            self.random_read_bytes = 0
        return (Schema(layout.fields.values()), bool(layout.image)) if layout else (Schema(), False)

    def read(self, file: ArchiveFile) -> None:
        """Read the labels, image paths and sizes of a file's rows. Raises SourceDamaged."""
        if self.layout is None:  # the metadata could not be read
            return
        with arrow_errors_as_damage(file.path), closing(RowGroups(file)) as groups:
            names = [*filter(None, (self.layout.image, self.layout.label, *self.layout.fields))]
            for group, first in enumerate(groups.starts[:-1]):
                self._add_group(groups.read(group, names), groups.encoded_bytes[group], file.path, first)

    def _add_group(self, columns: Columns, encoded: int, path: Path, first: int) -> None:
        import pyarrow.compute  # optional, and slow to import

        layout, rows = self.layout, len(next(iter(columns.values()), ()))
        labels = columns[layout.label].to_pylist() if layout.label else repeat(None, rows)
        paths: Iterable[str | None] = repeat(None, rows)
        sizes, have_bytes = np.zeros(rows, np.int64), [True] * rows
        if layout.image:
            images: Any = columns[layout.image]
            if layout.in_struct:
                paths = pyarrow.compute.struct_field(images, "path").to_pylist()
                images = pyarrow.compute.struct_field(images, "bytes")
            elif pyarrow.types.is_dictionary(images.type):
                images = images.cast(images.type.value_type)
            if str(images.type) == "binary_view":  # which has no binary_length
                images = images.cast(pyarrow.large_binary())
            sizes = pyarrow.compute.binary_length(images).fill_null(0).to_numpy().astype(np.int64)
            have_bytes = images.is_valid().to_pylist()
        in_memory, in_images = _memory_size(columns), int(sizes.sum())
        self._bytes += in_memory
        self._encoded_bytes += max(encoded, in_images)
        self.random_read_bytes += rows * in_memory
        is_shared = self._bytes > max(_SMALL, _MAX_SHARED * self._encoded_bytes)  # values are repeated
        lengths = sizes + max(0, (in_memory if is_shared else encoded) - in_images) // max(1, rows)
        values = zip(labels, have_bytes, paths, lengths.tolist(), strict=True)
        for row, (label, has_bytes, image, length) in enumerate(values, first):
            place = f"{path}, row {row}"
            with self.problems.collect("row"), errors_as_damage(place, "write the file again"):
                if not has_bytes and image:
                    raise no_bytes_error(image)
                stem = (image or "").rpartition(".")[0]
                key = stem if official_key(stem.rpartition("/")[2]) else image or ""  # without its extension
                if layout.classes and isinstance(label, int) and label >= len(layout.classes):
                    raise ValueError(f"has the label {label}, but there are {len(layout.classes)} classes")
                self.append(key, self.label_of(label), length=length, offset=row)


METADATA_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ParquetRows(RecordSource):
    """Rows of Parquet files; keys are the images' paths if all differ, and else files and row numbers."""

    LAYOUT = "parquet"
    CONTENTS = RowContents

    def new_contents(self, split: str, classes: Classes) -> RowContents:
        contents = RowContents(self, classes)
        schema, nullable = self._read_schema(split, contents.problems)
        path = self.files.top / self.files.by_split[split][0]
        if not contents.problems:
            with (
                contents.problems.collect(),
                name_source_in_errors(path),
                ArchiveFile(path) as archive,
                arrow_errors_as_damage(path),
                closing(RowGroups(archive)) as groups,
            ):
                contents.layout = detect_layout(schema, nullable, self.source_options, groups.first_value)
                for label, class_name in enumerate(contents.layout.classes):
                    classes.add_number(label, class_name)
        return contents

    def _read_schema(self, split: str, problems: Problems) -> tuple[Any, frozenset[str]]:
        """Return the schema of a split's files, and the columns with nulls; unreadable files are problems."""
        schema, first, nullable = None, "", set[str]()
        with WorkerPool(1) as pool:  # damaged metadata makes pyarrow abort the process
            for name in self.files.by_split[split]:
                path = self.files.top / name
                with problems.collect():
                    try:
                        own, nulls = pool.call_within(METADATA_TIMEOUT_S, None, _read_metadata, path)
                    except ChildDied as error:
                        crashed = f"has damaged metadata, on which pyarrow crashes with {error.signal}"
                        raise SourceDamaged(f"{crashed}; write it again", path=path) from error
                    nullable |= nulls
                    if schema is None:
                        schema, first = own, name
                    elif not schema.equals(own, check_metadata=True):
                        other = f"has different columns from {first}; put them into two folders"
                        raise SourceDamaged(other, path=path)
        return schema, frozenset(nullable)


def _read_metadata(path: Path) -> tuple[Any, set[str]]:
    """Return the schema, and the columns with nulls."""
    with ArchiveFile(path) as archive, arrow_errors_as_damage(path), open_parquet(archive) as file:
        file.metadata.to_dict()  # read all that is used later
        nulls = set()
        for group in range(file.metadata.num_row_groups):
            for number in range(file.metadata.num_columns):
                chunk = file.metadata.row_group(group).column(number)
                if chunk.is_stats_set and chunk.statistics.has_null_count and chunk.statistics.null_count:
                    nulls.add(chunk.path_in_schema)
        return file.schema_arrow, nulls
