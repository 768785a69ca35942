"""The contract of shards in every container: writing and reading."""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import CorruptRecord, ShardDamaged
from shardprep.formats.records.record import Record, record_crc
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.shards.files import ShardFile

SUFFIXES = {"lmdb": ".lmdb", "hdf5": ".h5", "tar": ".tar.npy"}


@dataclass(frozen=True, slots=True)
class Extent:
    """The contents of one shard in numbers; the sizes of files and maps depend on these alone."""

    records: int
    payload_bytes: int
    key_bytes: int


class Stored(NamedTuple):
    """A record as stored in a shard, not yet checked against its checksum."""

    key: bytes
    label: int
    crc32c: int
    image: bytes


Memory = npt.NDArray[np.uint8]
Room = Callable[[int], Memory]
"""Returns that many bytes, contiguous and writable, to read an image into."""


class Placed(NamedTuple):
    """A stored record with its image in memory that the caller gave."""

    key: bytes
    label: int
    crc32c: int
    image: Memory


Found = tuple[bytes, int, int, int, int]
"""A record without its image: key, label, CRC-32C, and the image's offset in the file and length in bytes."""

Indexed = tuple[bytes, int, int]
"""A record's columns in the index: key, label, CRC-32C."""


class ShardWriter(Owned, AbstractContextManager["ShardWriter"]):
    """Writer of one shard, from its first record to its last. Equal records give equal bytes.

    Not thread-safe, not reusable. Leaving the context without an error finishes the file, which is
    not yet flushed to the disk; leaving it with an error closes the file, unfinished.
    """

    @abstractmethod
    def append(self, stored: Stored, offset: int = 0) -> None:
        """Store the next record. Raises OSError if the disk fails.

        ``offset`` is the image's place in its archive, which a container stores instead of the image if its
        images stay there.
        """


class ShardReader(Owned, AbstractContextManager["ShardReader"]):
    """Reader of one finished shard, by position. Reusable until closed.

    Thread-safe except for :meth:`close`. Neither copyable nor picklable; its path is both. Raises
    ShardDamaged if the container is malformed, CorruptRecord if a record does not match its checksum or
    the index, and OSError if the system fails or memory is short, which says nothing about the data. Each
    error names the record. A file that changes while it is open gives an error, never a signal.
    """

    instead = "open the shard again by its path"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = ShardFile(path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> None:
        """Check the container, and read the positions of the records."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of records in the shard."""

    @abstractmethod
    def _find(self, ordinal: int) -> Found:
        """Return the record at an ordinal below the length. Its image may end after the end of the file."""

    def stored(self, ordinal: int) -> Stored:
        """Return the record at an ordinal, unchecked."""
        try:
            key, label, crc32c, start, size = self._found(ordinal)
            image = self._file.read_at(size, start)
        except (OSError, MemoryError) as error:
            raise self._unread(ordinal, error) from error
        if len(image) != size:
            raise self._short(ordinal)
        return Stored(key, label, crc32c, image)

    def placed(self, ordinal: int, room: Room) -> Placed:
        """Return the record at an ordinal, unchecked, its image read into the memory of ``room(size)``."""
        try:
            key, label, crc32c, start, size = self._found(ordinal)
            place = room(size)
            count = self._file.read_into(place.data, start)
        except (OSError, MemoryError) as error:
            raise self._unread(ordinal, error) from error
        if count != size:
            raise self._short(ordinal)
        return Placed(key, label, crc32c, place)

    def _found(self, ordinal: int) -> Found:
        if not 0 <= ordinal < len(self):
            raise ShardDamaged(f"has no record {ordinal}", path=self.path)
        return self._find(ordinal)

    def _unread(self, ordinal: int, error: OSError | MemoryError) -> OSError:
        number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno or errno.EIO
        return OSError(number, f"{os.strerror(number)}, at record {ordinal}", os.fspath(self._file.path))

    def _short(self, ordinal: int) -> ShardDamaged:
        return ShardDamaged(f"ends before record {ordinal} does; prep repair rebuilds it", path=self.path)

    @property
    def is_deleted(self) -> bool:
        """Whether the file was deleted since it was opened."""
        return self._file.is_deleted

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def checked(self, ordinal: int, *, indexed: Indexed | None = None) -> Stored:
        """Return the record at an ordinal, checked against its checksum, and against the index if given."""
        stored = self.stored(ordinal)
        self._check(ordinal, stored, indexed)
        return stored

    def image_in(self, ordinal: int, room: Room, *, indexed: Indexed | None = None) -> Memory:
        """Return the image at an ordinal in the memory of ``room(size)``, its record checked in the same way.

        The checksum is computed from the copy. ``room`` is called at most once, and must not use this reader.
        """
        return self.checked_in(ordinal, room, indexed=indexed).image

    def checked_in(self, ordinal: int, room: Room, *, indexed: Indexed | None = None) -> Placed:
        """Return the record at an ordinal, its image in the memory of ``room(size)``, checked likewise."""
        placed = self.placed(ordinal, room)
        self._check(ordinal, placed, indexed)
        return placed

    def _check(self, ordinal: int, found: Stored | Placed, indexed: Indexed | None) -> None:
        if record_crc(found.key, found.label, found.image) != found.crc32c:
            raise self._corrupt(f"record {ordinal} does not match its CRC-32C", found.key)
        if indexed is not None and indexed != found[:3]:
            raise self._corrupt(f"record {ordinal} is not the one in the index", found.key)

    def _corrupt(self, message: str, key_bytes: bytes) -> CorruptRecord:
        key = key_bytes.decode("utf-8", "replace")
        advice = f"{message}; prep repair rebuilds the shard"
        return CorruptRecord(advice, path=self.path.parent, shard=self.path.name, key=key)

    def read(self, ordinal: int, *, indexed: Indexed | None = None) -> Record:
        """Return the record at an ordinal, checked in the same way, with its key as text."""
        stored = self.checked(ordinal, indexed=indexed)
        try:
            return Record(stored.key.decode(), stored.label, stored.image)
        except UnicodeDecodeError as error:
            raise self._corrupt(f"record {ordinal} has a key that is not UTF-8", stored.key) from error

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Container:
    """One kind of shard: its writer, its reader, the upper bound of its size, and its library's versions."""

    write: Callable[[Path, Extent], ShardWriter]
    read: Callable[[Path], ShardReader]
    bytes_needed: Callable[[Extent], int]
    library: Callable[[], dict[str, str | int]]
