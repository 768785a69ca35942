"""The source of Parquet files of Hugging Face's datasets, read in place and in bounded memory.

The contents of a column's pages are known from their headers, before they are decompressed. The file's
metadata says that, too, but pyarrow does not hold the pages to it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import MissingExtra, SourceDamaged, UsageError
from shardprep.formats.records.codecs import ArrayCodec
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, foreign_file
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.runtime.workers import Child, ChildDied
from shardprep.formats.sources.listing import official_key
from shardprep.formats.sources.record_files import (
    ADVICE,
    ByteWindow,
    Cursor,
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
_MAX_METADATA = 16 << 20
_MAX_ITEMS = 1 << 18  # of a list in the metadata; pyarrow makes room for as many as the file claims
MAX_GROUP_BYTES = 1 << 30  # of the columns of one row group, as they are in memory
_BATCH_BYTES = 64 << 20
_BYTE_ARRAY, _PREFIXED = "BYTE_ARRAY", "DELTA_BYTE_ARRAY"
_LEVEL_BYTES = 8  # of each value within a list or struct
_ELEMENT_BYTES = 4  # of an element of a list beside its value
_UNCOMPRESSED, _COMPRESSED = 2, 3
_DATA = (5, 8)  # of both versions: structs that begin with the number of values
_MOST_DEPTH = 8
Sizes = npt.NDArray[np.int64]
Columns = Mapping[str, Any]
"""Columns of a row group by name, each a pyarrow ``ChunkedArray``."""


def parquet_module(path: Path) -> ModuleType:
    """Return ``pyarrow.parquet``. Raises MissingExtra if it is not installed; ``path`` is what needs it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra.of("reading it", "pyarrow", "parquet", path=path) from error
    module: ModuleType = pyarrow.parquet
    return module


@contextmanager
def arrow_reads(place: str | Path, *, key: str | None = None) -> Iterator[None]:
    """Raise SourceDamaged for what pyarrow raises over a file: its OSError without errno is one, too."""
    with foreign_file(place, ADVICE, key=key):
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise ValueError(str(error)) from error
            raise


def opened(archive: ArchiveFile, **options: Any) -> Any:
    """Return the open ``ParquetFile``, with its metadata read. Raises SourceDamaged, MissingExtra."""
    module = parquet_module(archive.path)
    with arrow_reads(archive.path):
        length = int.from_bytes(archive.read_at(4, max(0, archive.end - 8)), "little")
        if length > _MAX_METADATA:
            raise ValueError(f"has {length} bytes of metadata, more than {_MAX_METADATA}")
        return module.ParquetFile(
            archive.path,
            thrift_string_size_limit=_MAX_METADATA,
            thrift_container_size_limit=_MAX_ITEMS,
            **options,
        )


def pages_of(archive: ArchiveFile, chunk: Any) -> tuple[int, int, int]:
    """Return the decompressed bytes of all pages and of the largest one, and the values with nulls.

    ``chunk`` is pyarrow's metadata of a column's part. Raises ValueError.
    """

    def count(number: int | None) -> int:
        if number is None or number < 0:
            raise ValueError(f"a page says that it has a size of {number}")
        return number

    start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < start:
        start = dictionary
    cursor, size, largest, values = Cursor(ByteWindow(archive.read_at, 0, archive.end), start), 0, 0, 0
    while values < chunk.num_values and cursor.at < start + chunk.total_compressed_size:
        header = _thrift_struct(cursor)
        length = count(header.get(_UNCOMPRESSED))
        size, largest = size + length, max(largest, length)
        values += max(count(header.get(data, {}).get(1, 0)) for data in _DATA)
        cursor.skip(count(header.get(_COMPRESSED)))
    return size, largest, values


def _thrift_struct(cursor: Cursor, depth: int = 0) -> dict[int, Any]:
    """Return the structs and numbers of 32 bits in a struct of Thrift's compact protocol, by field."""
    found: dict[int, Any] = {}
    number = 0
    while head := cursor.take(1)[0]:
        number = number + (head >> 4) if head >> 4 else _signed(cursor)
        number = (number + (1 << 15)) % (1 << 16) - (1 << 15)  # as in 16 bits
        match head & 15:
            case 1 | 2:  # true and false
                pass
            case 3 | 7 as kind:  # a byte and a double
                cursor.skip({3: 1, 7: 8}[kind])
            case 4 | 6:  # integers of 16 and 64 bits
                cursor.varint()
            case 5:
                found[number] = _signed(cursor)
            case 8:
                cursor.skip(cursor.varint())
            case 12 if depth < _MOST_DEPTH:
                found[number] = _thrift_struct(cursor, depth + 1)
            case kind:
                raise ValueError(f"a page's header has a field of type {kind}")
    return found


def _signed(cursor: Cursor) -> int:
    return (number := cursor.varint()) >> 1 ^ -(number & 1)


class RowGroups(Owned):
    """The row groups of an open file; ``starts`` are the numbers of their first rows, and the number of rows.

    ``encoded_bytes`` are those that each says that its columns have in the file, decompressed. Repeated text
    and bytes are in memory once: a dictionary in the file stays one.
    """

    def __init__(self, archive: ArchiveFile) -> None:
        self.archive = archive
        with opened(archive) as file, arrow_reads(archive.path):
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
            texts = {chunk.path_in_schema for chunk in chunks if chunk.physical_type == _BYTE_ARRAY}
            # pyarrow makes no dictionaries of values that share prefixes, and of extension types
            texts -= {chunk.path_in_schema for chunk in chunks if _PREFIXED in chunk.encodings}
            for field in file.schema_arrow:
                if "extension" in str(field.type):
                    texts -= {path for path in texts if _is_of(path, field.name)}
        self.starts = tuple(accumulate((group.num_rows for group in groups), initial=0))
        self.encoded_bytes = [group.total_byte_size for group in groups]
        self._dictionaries = texts
        self._file = opened(archive, metadata=metadata, read_dictionary=sorted(texts))

    def close(self) -> None:
        self._file.close()

    def first(self, name: str) -> Any:
        """Return the value of a column in the first row; None without rows."""
        for group in range(len(self.starts) - 1):
            self._rows_at_once(group, name)
            for batch in self._file.iter_batches(1, row_groups=[group], columns=[name], use_threads=False):
                if len(batch):
                    return batch.column(0)[0].as_py()
        return None

    def read(self, group: int, names: Sequence[str]) -> Columns:
        """Return some columns of a row group. Raises SourceDamaged if they are too large, ValueError."""
        import pyarrow  # optional, and slow to import, here and below

        size, steps, found = 0, dict[str, int](), dict[str, Any]()
        for name in names:
            steps[name], size = self._rows_at_once(group, name, size)
        rows = self.starts[group + 1] - self.starts[group]
        for name, step in steps.items():
            if step:
                arrays = []
                for batch in self._file.iter_batches(
                    step, row_groups=[group], columns=[name], use_threads=False
                ):
                    arrays.append(batch.column(0))
                    size = self._bounded(group, size + batch.nbytes)
                found[name] = pyarrow.chunked_array(arrays, self._file.schema_arrow.field(name).type)
            else:
                table = self._file.read_row_group(group, columns=[name], use_threads=False)
                found[name] = table.column(name)
            if len(found[name]) != rows:
                raise ValueError(f"the row group {group} has {len(found[name])} rows, but says {rows}")
        return found

    def _rows_at_once(self, group: int, name: str, size: int = 0) -> tuple[int, int]:
        """Return how many rows of a column may be read at once, 0 for all; and the size with the known."""
        metadata = self._file.metadata.row_group(group)
        most, most_values, is_shared = 0, 0, True
        for number in range(metadata.num_columns):
            chunk = metadata.column(number)
            if not _is_of(chunk.path_in_schema, name):
                continue
            pages, largest, values = pages_of(self.archive, chunk)
            most_values = max(most_values, values)
            if chunk.physical_type != _BYTE_ARRAY or chunk.path_in_schema in self._dictionaries:
                size += pages
                continue
            is_shared, most = False, max(most, largest)
            in_list = self._file.schema.column(number).max_repetition_level > 0  # one row may have all values
            size += largest * values if in_list else largest
        size += _cell_bytes(self._file.schema_arrow.field(name).type, metadata.num_rows, most_values)
        return 0 if is_shared else max(1, _BATCH_BYTES // max(1, most)), self._bounded(group, size)

    def _bounded(self, group: int, size: int) -> int:
        """Return the bytes that a row group takes in memory. Raises SourceDamaged if these are too many."""
        if size > MAX_GROUP_BYTES:
            too_large = f"the row group {group} takes more than {MAX_GROUP_BYTES:,} bytes in memory"
            raise SourceDamaged(f"{too_large}; write smaller row groups", path=self.archive.path)
        return size


def _is_of(path: str, column: str) -> bool:
    return path == column or path.startswith(f"{column}.")


def _cell_bytes(kind: Any, count: int, values: int, level_bytes: int = 0) -> int:
    """Return the most bytes of ``count`` cells of a type; ``values`` is the most that a list in it can have.

    Values of text count by their places, as in a dictionary.
    """
    import pyarrow

    kind = getattr(kind, "storage_type", kind)
    if pyarrow.types.is_struct(kind):
        parts, inner = [kind.field(number).type for number in range(kind.num_fields)], count
    elif pyarrow.types.is_map(kind):
        parts, inner = [kind.key_type, kind.item_type], values
    elif pyarrow.types.is_fixed_size_list(kind):
        parts, inner = [kind.value_type], count * kind.list_size  # also of a null
    elif pyarrow.types.is_dictionary(kind) or not hasattr(kind, "value_type"):
        try:
            width = max(1, int(kind.bit_width) // 8)
        except ValueError:
            width = 4
        return count * (width + level_bytes)
    else:
        parts, inner = [kind.value_type], values
    return sum(_cell_bytes(part, inner, values, _LEVEL_BYTES) for part in parts)


def no_bytes(path: object) -> ValueError:
    """Return the error for an image that is only a path."""
    return ValueError(f"has only the path of the image, {str(path)[:200]!r}, not its bytes; embed the images")


def image_of(value: Any) -> bytes:
    """Return the bytes of an image, with its path beside it or not. Raises ValueError if there are none."""
    path = None
    if isinstance(value, dict):
        value, path = value.get("bytes"), value.get("path")
    if not isinstance(value, bytes):
        raise no_bytes(path)
    return value


def value_of(value: Any, field: Field) -> Any:
    """Return the value as its column takes it. Raises ValueError and TypeError for other values."""
    if field.kind == "image":
        return image_of(value)
    if field.kind == "label":
        return UNLABELLED if value is None else value
    if field.kind in ("json", "text"):
        return _plain(value)
    if isinstance(field.codec, ArrayCodec):
        array = np.array(value, field.codec.elements)
        return array if array.shape else array[()]
    return value


def _plain(value: Any) -> Any:
    """Return the value with times and decimals as text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else str(value)


def objects_of(column: Any) -> Iterator[Any]:
    """Yield the values of a column without lists; one that is repeated is one object."""
    import pyarrow

    for array in column.chunks:
        if pyarrow.types.is_dictionary(array.type):
            values = array.dictionary.to_pylist()
            yield from (None if place is None else values[place] for place in array.indices.to_pylist())
        else:
            yield from array.to_pylist()


def sizes_of(column: Any) -> Sizes:
    """Return the bytes of each row of a column, int64 [n]; no value is copied."""
    return np.concatenate([np.zeros(0, np.int64), *map(_sizes, column.chunks)])


def _sizes(array: Any) -> Sizes:
    import pyarrow.compute

    types, kind = pyarrow.types, array.type
    if types.is_dictionary(kind):
        sizes = np.append(_sizes(array.dictionary), np.int64(0))  # and that of a null
        return np.asarray(sizes[_numbers(array.indices.fill_null(len(sizes) - 1))], np.int64)
    if str(kind) in (*_TEXT, *_BINARY):
        return _numbers(pyarrow.compute.binary_length(array))
    if types.is_struct(kind):
        parts = [_sizes(array.field(number)) for number in range(kind.num_fields)]
        return np.asarray(sum(parts, np.zeros(len(array), np.int64)), np.int64)
    if hasattr(array, "storage"):
        return _sizes(array.storage)
    element_bytes = _ELEMENT_BYTES
    if types.is_fixed_size_list(kind):
        element_bytes = 0
        starts = (np.arange(len(array)) + array.offset) * kind.list_size
        ends = starts + kind.list_size
    elif hasattr(array, "sizes"):  # a list view
        starts = _numbers(array.offsets)
        ends = starts + _numbers(array.sizes)
    elif hasattr(array, "values"):  # a list or map
        starts, ends = _numbers(array.offsets)[:-1], _numbers(array.offsets)[1:]
    else:
        return np.full(len(array), -(-array.nbytes // max(1, len(array))), np.int64)
    before = np.append(np.int64(0), np.cumsum(_sizes(array.values) + element_bytes, dtype=np.int64))
    return np.asarray(before[ends] - before[starts], np.int64)


def _numbers(array: Any) -> Sizes:
    found: Sizes = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def parquet(path: Path, split: str | None, options: SourceOptions) -> ParquetRows | None:
    """Return the source of the Parquet files at a path, or in the folder there; None if there are none.

    Raises UsageError, also without the library pyarrow, and OSError.
    """
    files = split_files(path, split, _FILE, follow_symlinks=options.follow_symlinks)
    if files is None:
        return None
    parquet_module(path)
    return ParquetRows(files, options)


@dataclass(frozen=True)
class RowLayout:
    """The columns with image and label, "" for none; the names of its classes; the columns beside them.

    ``fields`` maps the other columns of the file to fields. With ``in_struct`` an image has bytes
    and path.
    """

    image: str
    in_struct: bool
    label: str
    classes: tuple[str, ...]
    fields: Mapping[str, Field]

    @cached_property
    def name_of(self) -> Mapping[str, str]:
        """The names in the file of the other columns, by those of their fields."""
        return {field.name: name for name, field in self.fields.items()}


def layout_of(
    schema: Any, nullable: frozenset[str], options: SourceOptions, first: Callable[[str], Any]
) -> RowLayout:
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
    return RowLayout(
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


class RowReader(FilesReader):
    """Reader of the rows of Parquet files. An entry's offset is the number of its row."""

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
                kept[place] = file.read(group, [*filter(None, (self.layout.image, *self.layout.fields))])
            while (
                len(kept) > 1
                and sum(column.nbytes for columns in kept.values() for column in columns.values())
                > MAX_KEPT_BYTES
            ):
                kept.popitem(last=False)
        kept.move_to_end(place)
        return kept[place], number - file.starts[group]


class RowContents(RecordContents):
    """The rows so far, with their sizes."""

    READER = RowReader
    is_readable = True

    def __init__(self, top: Path, layout: RowLayout) -> None:
        super().__init__(top, layout)
        self._rows = self._file_bytes = self._bytes = self._encoded_bytes = 0

    def columns(self) -> tuple[Schema, bool]:
        return Schema(self.layout.fields.values()), bool(self.layout.image)

    def read(self, file: ArchiveFile) -> None:
        """Read labels, paths and sizes of a file's rows. Raises SourceDamaged."""
        if not self.is_readable:
            return
        with arrow_reads(file.path), closing(RowGroups(file)) as groups:
            rows = groups.starts[-1]
            self._rows, self._file_bytes = self._rows + rows, self._file_bytes + file.end
            if self._rows > max(_ROWS_OF_NO_BYTES, self._file_bytes):  # a few bytes may claim billions
                few = f"claims {rows:,} rows in {file.end:,} bytes, less than a byte for each"
                raise SourceDamaged(few, path=file.path)
            for group, first in enumerate(groups.starts[:-1]):
                names = (self.layout.image, self.layout.label, *self.layout.fields)
                columns = groups.read(group, [*filter(None, names)])
                self._add_group(columns, groups.encoded_bytes[group], file.path, first)

    def _add_group(self, columns: Columns, encoded: int, path: Path, first: int) -> None:
        import pyarrow.compute

        layout, rows = self.layout, len(next(iter(columns.values()), ()))
        labels = objects_of(columns[layout.label]) if layout.label else repeat(None, rows)
        paths: Iterable[str | None] = repeat(None, rows)
        sizes, have_bytes = np.zeros(rows, np.int64), [True] * rows
        if layout.image:
            images: Any = columns[layout.image]
            if layout.in_struct:
                paths = objects_of(pyarrow.compute.struct_field(images, "path"))
                images = pyarrow.compute.struct_field(images, "bytes")
            sizes, have_bytes = sizes_of(images), images.is_valid().to_pylist()
        share = max(0, encoded - int(sizes.sum())) // max(1, rows)  # of the bytes of all other columns
        lengths = sizes + min(share, _MOST_BYTES)
        counted = sum(map(sizes_of, columns.values()), np.zeros(rows, np.int64))
        self._bytes += int(counted.sum())
        self._encoded_bytes += int(lengths.sum())
        is_shared = self._bytes > max(_SMALL, _MOST_SHARED * self._encoded_bytes)  # values are repeated
        lengths = counted if is_shared else np.where(counted > _MOST_BYTES, counted, lengths)
        every = zip(labels, have_bytes, paths, lengths.tolist(), strict=True)
        for row, (label, has_bytes, image, length) in enumerate(every, first):
            place = f"{path}, row {row}"
            with self.problems.collected("row"), foreign_file(place, "write the file again"):
                if not has_bytes:
                    raise no_bytes(image)
                stem = (image or "").rpartition(".")[0]
                key = stem if official_key(stem.rpartition("/")[2]) else image or ""  # without its extension
                if isinstance(label, str | bytes):
                    label = self.classes.add_text(label)
                elif label is None:
                    label = UNLABELLED
                elif layout.classes and label >= len(layout.classes):
                    raise ValueError(f"has the label {label}, but there are {len(layout.classes)} classes")
                else:
                    label = self.classes.add(label)
                self.append(key, label, length=length, offset=row)


METADATA_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ParquetRows(RecordSource):
    """Rows of Parquet files.

    A record's key is the path of its image, where each row has one and no two the same; else the file and the
    number of its row.
    """

    LAYOUT = "parquet"
    CONTENTS = RowContents

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

    def _layout(self, split: str, problems: Problems) -> RowLayout:
        """Return the layout of a split's files; one that cannot be read, or has another, is a problem."""
        schema, first, nullable = None, "", set[str]()
        with Child() as child:
            for name in self.files.of_split[split]:
                path = self.files.top / name
                with problems.collected():
                    try:
                        nullable |= set(child.call_within(METADATA_TIMEOUT_S, _with_nulls, path))
                    except ChildDied as error:  # damaged metadata make pyarrow abort the process
                        message = f"has damaged metadata, on which pyarrow crashes with {error.signal}; write it again"
                        raise SourceDamaged(message, path=path) from error
                    with ArchiveFile(path) as archive, arrow_reads(path), opened(archive) as file:
                        if schema is None:
                            schema, first = file.schema_arrow, name
                        elif not schema.equals(file.schema_arrow, check_metadata=True):
                            raise SourceDamaged(
                                f"has different columns from {first}; put them into two folders", path=path
                            )
        if schema is None:
            return RowLayout("", False, "", (), {})
        path = self.files.top / first
        with (
            naming_source(path),
            ArchiveFile(path) as archive,
            arrow_reads(path),
            closing(RowGroups(archive)) as groups,
        ):
            return layout_of(schema, frozenset(nullable), self.source_options, groups.first)


def _with_nulls(path: Path) -> list[str]:
    """Return the columns with nulls."""
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
