"""The rows of Parquet files, in bounded memory: their sizes are known before they are decompressed.

The contents of a column's pages are known from their headers. The file's metadata says that, too, but pyarrow
does not hold the pages to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import MissingExtra, SourceDamaged
from shardprep.formats.records.codecs import ArrayCodec
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.schema import Field
from shardprep.formats.runtime.files import ArchiveFile, foreign_file
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.sources.record_files import ADVICE
from shardprep.formats.sources.tfrecord import MAX_VARINT, ByteWindow, varint

_MAX_METADATA = 16 << 20
_MAX_ITEMS = 1 << 18  # of a list in the metadata; pyarrow makes room for as many as the file claims
MAX_GROUP_BYTES = 1 << 30  # of the columns of one row group, as they are in memory

_BATCH_BYTES = 64 << 20
_TEXT, _PREFIXED = "BYTE_ARRAY", "DELTA_BYTE_ARRAY"
_LEVEL_BYTES = 8  # of each value within a list or struct
_ELEMENT_BYTES = 4  # of an element of a list beside its value

_UNCOMPRESSED, _COMPRESSED = 2, 3
_DATA = (5, 8)  # of both versions: structs that begin with the number of values
_TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
_SIZES = {_BYTE: 1, _DOUBLE: 8}
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


class Pages(NamedTuple):
    """The decompressed bytes of all pages and of the largest one, and the number of values with nulls."""

    size: int
    largest: int
    values: int


def pages_of(archive: ArchiveFile, chunk: Any) -> Pages:
    """Return the pages of a column chunk, given its pyarrow metadata. Raises ValueError."""
    start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < start:
        start = dictionary
    reader = _CompactReader(ByteWindow(archive.read_at, archive.end), start)
    size = largest = values = 0
    while values < chunk.num_values and reader.at < start + chunk.total_compressed_size:
        header = reader.struct()
        length, compressed = _count(header.get(_UNCOMPRESSED)), _count(header.get(_COMPRESSED))
        size, largest = size + length, max(largest, length)
        values += max(_count(header.get(data, {}).get(1, 0)) for data in _DATA)
        reader.at += compressed
    return Pages(size, largest, values)


def _count(number: int | None) -> int:
    if number is None or number < 0:
        raise ValueError(f"a page says that it has a size of {number}")
    return number


class _CompactReader:
    """Reader of Thrift's compact protocol: a struct becomes a dict by the numbers of its fields.

    It has those fields that a page's header needs: structs, and numbers of 32 bits.
    """

    def __init__(self, window: ByteWindow, at: int) -> None:
        self.at = at
        self._window = window

    def struct(self, depth: int = 0) -> dict[int, Any]:
        found: dict[int, Any] = {}
        number = 0
        while head := self._take(1)[0]:
            number = number + (head >> 4) if head >> 4 else self._integer()
            number = (number + (1 << 15)) % (1 << 16) - (1 << 15)  # as in 16 bits
            kind = head & 15
            if kind == _STRUCT and depth < _MOST_DEPTH:
                found[number] = self.struct(depth + 1)
            elif kind == _INT32:
                found[number] = self._integer()
            elif kind in (_INT16, _INT64):
                self._varint()
            elif kind in _SIZES:
                self._take(_SIZES[kind])
            elif kind == _BINARY:
                length = self._varint()
                self.at += length
            elif kind not in (_TRUE, _FALSE):
                raise ValueError(f"a page's header has a field of type {kind}")
        return found

    def _take(self, length: int) -> bytes:
        if self.at + length > self._window.end:
            raise ValueError("the file ends within the header of a page")
        self.at += length
        return self._window.take(self.at - length, self.at)

    def _varint(self) -> int:
        data = self._window.take(self.at, min(self.at + MAX_VARINT, self._window.end))
        number, used = varint(data, 0)
        self.at += used
        return number

    def _integer(self) -> int:
        number = self._varint()
        return number >> 1 ^ -(number & 1)


class RowGroups(Owned):
    """The row groups of an open file; ``starts`` are the numbers of their first rows, and the number of rows.

    Repeated text and bytes are in memory once: a dictionary in the file stays one.
    """

    def __init__(self, archive: ArchiveFile) -> None:
        self.archive = archive
        with opened(archive) as file, arrow_reads(archive.path):
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
            texts = {chunk.path_in_schema for chunk in chunks if chunk.physical_type == _TEXT}
            # pyarrow makes no dictionaries of values that share prefixes, and of extension types
            texts -= {chunk.path_in_schema for chunk in chunks if _PREFIXED in chunk.encodings}
            for field in file.schema_arrow:
                if "extension" in str(field.type):
                    texts -= {path for path in texts if _is_of(path, field.name)}
        self.starts = tuple(accumulate((group.num_rows for group in groups), initial=0))
        self._dictionaries = texts
        self._file = opened(archive, metadata=metadata, read_dictionary=sorted(texts))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def encoded_bytes(self, group: int) -> int:
        """Return how many bytes a row group says that its columns have in the file, decompressed."""
        return int(self._file.metadata.row_group(group).total_byte_size)

    def first(self, name: str) -> Any:
        """Return the value of a column in the first row; None without rows."""
        for group in range(len(self.starts) - 1):
            self._rows_at_once(group, name, _Size(self.archive.path, group))
            for batch in self._file.iter_batches(1, row_groups=[group], columns=[name], use_threads=False):
                if len(batch):
                    return batch.column(0)[0].as_py()
        return None

    def read(self, group: int, names: Sequence[str]) -> Columns:
        """Return some columns of a row group. Raises SourceDamaged if they are too large, ValueError."""
        size = _Size(self.archive.path, group)
        steps = {name: self._rows_at_once(group, name, size) for name in names}
        whole = [name for name, step in steps.items() if not step]
        table = self._file.read_row_group(group, columns=whole, use_threads=False)
        found = {name: table.column(name) for name in whole}
        found |= {name: self._in_batches(group, name, step, size) for name, step in steps.items() if step}
        rows = self.starts[group + 1] - self.starts[group]
        for column in found.values():
            if len(column) != rows:
                raise ValueError(f"the row group {group} has {len(column)} rows, but says {rows}")
        return {name: found[name] for name in names}

    def _rows_at_once(self, group: int, name: str, size: _Size) -> int:
        """Return how many rows of a column may be read at once, 0 for all; add its known size."""
        metadata = self._file.metadata.row_group(group)
        largest, values, is_shared = 0, 0, True
        for number in range(metadata.num_columns):
            chunk = metadata.column(number)
            if not _is_of(chunk.path_in_schema, name):
                continue
            pages = pages_of(self.archive, chunk)
            values = max(values, pages.values)
            if chunk.physical_type != _TEXT or chunk.path_in_schema in self._dictionaries:
                size.add(pages.size)
                continue
            is_shared = False
            largest = max(largest, pages.largest)
            in_list = self._file.schema.column(number).max_repetition_level > 0  # one row may have all values
            size.add(pages.largest * pages.values if in_list else pages.largest)
        size.add(_cell_bytes(self._file.schema_arrow.field(name).type, metadata.num_rows, values))
        return 0 if is_shared else max(1, _BATCH_BYTES // max(1, largest))

    def _in_batches(self, group: int, name: str, rows: int, size: _Size) -> Any:
        import pyarrow  # optional, and slow to import

        arrays = []
        for batch in self._file.iter_batches(rows, row_groups=[group], columns=[name], use_threads=False):
            arrays.append(batch.column(0))
            size.add(batch.nbytes)
        return pyarrow.chunked_array(arrays, self._file.schema_arrow.field(name).type)


class _Size:
    """The size of a row group in memory, as far as it is known."""

    def __init__(self, path: Path, group: int) -> None:
        self._path, self._group, self._bytes = path, group, 0

    def add(self, size: int) -> None:
        """Add some bytes. Raises SourceDamaged if these are too many."""
        self._bytes += size
        if self._bytes > MAX_GROUP_BYTES:
            too_large = f"the row group {self._group} takes more than {MAX_GROUP_BYTES:,} bytes in memory"
            raise SourceDamaged(f"{too_large}; write smaller row groups", path=self._path)


def _is_of(path: str, column: str) -> bool:
    return path == column or path.startswith(f"{column}.")


def _cell_bytes(kind: Any, count: int, values: int, level_bytes: int = 0) -> int:
    """Return the most bytes of ``count`` cells of a type; ``values`` is the most that a list in it can have.

    Values of text count by their places, as in a dictionary.
    """
    import pyarrow  # optional, and slow to import

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
    import pyarrow  # optional, and slow to import

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
    import pyarrow  # optional, and slow to import
    import pyarrow.compute

    types, kind = pyarrow.types, array.type
    texts = (types.is_binary, types.is_string, types.is_large_binary, types.is_large_string)
    if types.is_dictionary(kind):
        sizes = np.append(_sizes(array.dictionary), np.int64(0))  # and that of a null
        return np.asarray(sizes[_numbers(array.indices.fill_null(len(sizes) - 1))], np.int64)
    if any(is_text(kind) for is_text in texts):
        return _numbers(pyarrow.compute.binary_length(array))
    if types.is_struct(kind):
        parts = [_sizes(array.field(number)) for number in range(kind.num_fields)]
        return np.asarray(sum(parts, np.zeros(len(array), np.int64)), np.int64)
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        return np.asarray(_sizes(values).reshape(len(array), size).sum(axis=1), np.int64)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = _numbers(array.offsets)
        return _between(array.values, offsets[:-1], offsets[1:])
    if hasattr(array, "sizes"):  # a list view
        starts = _numbers(array.offsets)
        return _between(array.values, starts, starts + _numbers(array.sizes))
    if hasattr(array, "storage"):
        return _sizes(array.storage)
    return np.full(len(array), -(-array.nbytes // max(1, len(array))), np.int64)


def _between(array: Any, starts: Sizes, ends: Sizes) -> Sizes:
    """Return the bytes of all values from each start to its end."""
    every = np.cumsum(_sizes(array) + _ELEMENT_BYTES, dtype=np.int64)
    before = np.concatenate([np.zeros(1, np.int64), every])
    return np.asarray(before[ends] - before[starts], np.int64)


def _numbers(array: Any) -> Sizes:
    found: Sizes = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
