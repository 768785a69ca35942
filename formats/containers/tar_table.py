"""Shards of images that stay in an archive: the shard's file is a table of their places in it.

The table is .npy, one row per record; the archive is ``archive.tar`` in the table's folder, usually a link.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import CorruptRecord, ShardDamaged
from shardprep.formats.records.record import MAX_IMAGE_BYTES, MAX_KEY_BYTES
from shardprep.formats.system.regular_file import naming

from .archive import ARCHIVE_NAME, advice_for, not_indexed, place_of
from .container import Container, Found, ShardReader, ShardWriter, Stored
from .shard_file import ShardFile
from .table import table_header, write_table

if TYPE_CHECKING:
    from .container import Extent

MAX_TABLE_BYTES = 1 << 30  # of 20 million records
HEADER_BYTES = 256  # more than the header of any table has

_SHAPE = re.compile(rb"'key', '\|S([1-9]\d{0,3})'.*'shape': \((0|[1-9]\d{0,9}),\)")


def place_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Return the columns of a table: the place of an image in the archive, and its record without it."""
    return np.dtype(
        [
            ("offset", "<u8"),
            ("length", "<u4"),
            ("label", "<i4"),
            ("crc32c", "<u4"),
            ("key", f"S{max(1, key_bytes)}"),
        ]
    )


def bytes_needed(extent: Extent) -> int:
    """Return an upper bound of the file's size."""
    return HEADER_BYTES + extent.records * place_dtype(extent.key_bytes).itemsize


class TarTableWriter(ShardWriter):
    """Writer of a table. It writes the file when it is left, and does not look at the archive."""

    def __init__(self, path: Path, extent: Extent) -> None:
        self._file = path.open("xb")
        self._path = path
        self._rows = np.zeros(extent.records, place_dtype(extent.key_bytes))
        self._count = 0

    def append(self, stored: Stored, offset: int = 0) -> None:
        key, label, crc32c, image = stored
        self._rows[self._count] = (offset, len(image), label, crc32c, key)
        self._count += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with naming(self._path), self._file:
            if kind is None:
                write_table(self._file, self._rows[: self._count])


class TarTableReader(ShardReader):
    """Reader of one shard, with its table in memory: about 60 bytes per record."""

    def _open(self) -> None:
        try:
            self._rows = self._table()
            self._file.close()
            self._file = ShardFile(self._link)
            self._check_ends()
        except MemoryError as error:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), os.fspath(self.path)) from error
        except FileNotFoundError as error:
            raise not_indexed(self._link, "is not there") from error

    @property
    def _link(self) -> Path:
        return self.path.with_name(ARCHIVE_NAME)

    def _table(self) -> npt.NDArray[np.void]:
        file = self._file
        if not 10 < file.size <= MAX_TABLE_BYTES:
            raise self._no_table()
        data = file.read_at(file.size, 0)
        start = 10 + int.from_bytes(data[8:10], "little")
        shape = _SHAPE.search(data[:start])
        key_bytes, records = (int(number) for number in shape.groups()) if shape else (0, 0)
        row = place_dtype(key_bytes)
        if not 1 <= key_bytes <= MAX_KEY_BYTES or data[:start] != table_header(row, records):
            raise self._no_table()
        if len(data) - start != records * row.itemsize:
            raise self._no_table()
        return np.frombuffer(data, row, records, start)

    def _no_table(self) -> ShardDamaged:
        message = "is not a table of images in an archive; prep repair rebuilds it"
        return ShardDamaged(message, path=self.path)

    def _check_ends(self) -> None:
        """Raise ShardDamaged for an image that the archive cannot have."""
        offsets, lengths, size = self._rows["offset"], self._rows["length"], np.uint64(self._file.size)
        if (lengths > MAX_IMAGE_BYTES).any():
            raise ShardDamaged("has lengths that no image has; prep repair rebuilds it", path=self.path)
        outside = (offsets > size) | (lengths > size - np.minimum(offsets, size))
        if outside.any():
            raise not_indexed(
                self._link,
                f"has {size} bytes, and record {outside.argmax()} of {self.path.name} ends after them",
            )

    def __len__(self) -> int:
        return len(self._rows)

    def _find(self, ordinal: int) -> Found:
        offset, length, label, crc32c, key = self._rows[ordinal].item()
        return key, label, crc32c, offset, length

    def _short(self, ordinal: int) -> ShardDamaged:
        return not_indexed(self._link, f"ends before record {ordinal} of {self.path.name} does")

    def _corrupt(self, message: str, key_bytes: bytes) -> CorruptRecord:
        key = key_bytes.decode("utf-8", "replace")
        changed = f"{message}: the archive, or its table, has changed; {advice_for(self._link)}"
        return CorruptRecord(changed, path=place_of(self._link), shard=self.path.name, key=key)


def library() -> dict[str, str | int]:
    """Return nothing: the bytes of a table depend on the records and their places alone."""
    return {}


CONTAINER = Container(write=TarTableWriter, read=TarTableReader, bytes_needed=bytes_needed, library=library)
