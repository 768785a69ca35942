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
from shardprep.formats.records.record import record_crc
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.shards.files import ShardFile

SUFFIXES = {"lmdb": ".lmdb", "hdf5": ".h5", "tar": ".tar.npy"}


@dataclass(frozen=True, slots=True)
class Extent:
    """The contents of one shard in numbers; the sizes of files and maps depend on these alone."""

    records: int
    payload_bytes: int
    key_bytes: int


class StoredRecord(NamedTuple):
    """A record as stored in a shard, not yet checked against its checksum.

    ``offset`` is the image's place in the shard's file, or in the archive that it stays in.
    """

    key: bytes
    label: int
    crc32c: int
    image: bytes
    offset: int = 0


Memory = npt.NDArray[np.uint8]
Room = Callable[[int], Memory]
"""Returns that many bytes, contiguous and writable, to read an image into."""

Address = tuple[bytes, int, int, int, int]
"""A record without its image: key, label, CRC-32C, and the image's offset in the file and length in bytes."""


class ShardWriter(Owned, AbstractContextManager["ShardWriter"]):
    """Writer of one shard, from its first record to its last. Equal records give equal bytes.

    Not thread-safe, not reusable. Leaving the context without an error finishes the file, which is
    not yet flushed to the disk; leaving it with an error closes the file, unfinished.
    """

    @abstractmethod
    def append(self, stored: StoredRecord) -> None:
        """Store the next record. Raises OSError if the disk fails."""


class ShardReader(Owned, AbstractContextManager["ShardReader"]):
    """Reader of the records of a finished shard, by their ordinals, without the index. Reusable until closed.

    It proves a shard after it was written and when it is verified, and finds the addresses that an index of
    format 1.0 lacks; training reads by the addresses of the index (:mod:`.read`). Thread-safe except for
    :meth:`close`. Neither copyable nor picklable. Raises ShardDamaged if the container is malformed,
    CorruptRecord if a record does not match its checksum, and OSError if the system fails or memory is short,
    which says nothing about the data. A file that changes while it is open gives an error, never a signal.
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
    def _find(self, ordinal: int) -> Address:
        """Return the record at an ordinal below the length. Its image may end after the end of the file."""

    def address(self, ordinal: int) -> Address:
        """Return the key, label, checksum and place of the record at an ordinal."""
        if not 0 <= ordinal < len(self):
            raise ShardDamaged(f"has no record {ordinal}", path=self.path)
        try:
            return self._find(ordinal)
        except (OSError, MemoryError) as error:
            raise unread(self._file.path, ordinal, error) from error

    def stored(self, ordinal: int) -> StoredRecord:
        """Return the record at an ordinal, unchecked."""
        key, label, crc32c, offset, length = self.address(ordinal)
        try:
            image = self._file.read_at(length, offset)
        except (OSError, MemoryError) as error:
            raise unread(self._file.path, ordinal, error) from error
        if len(image) != length:
            raise self._short(ordinal)
        return StoredRecord(key, label, crc32c, image, offset)

    def checked(self, ordinal: int) -> StoredRecord:
        """Return the record at an ordinal, checked against its checksum."""
        stored = self.stored(ordinal)
        if record_crc(stored.key, stored.label, stored.image) != stored.crc32c:
            raise self._corrupt(ordinal, stored.key)
        return stored

    def _short(self, ordinal: int) -> ShardDamaged:
        return cut_off(self.path, ordinal)

    def _corrupt(self, ordinal: int, key: bytes) -> CorruptRecord:
        return corrupt(self.path, ordinal, key)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def unread(path: Path, ordinal: int, error: OSError | MemoryError) -> OSError:
    """Return the error for a record that the system did not read, or has no memory for."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno or errno.EIO
    return OSError(number, f"{os.strerror(number)}, at record {ordinal}", os.fspath(path))


def cut_off(path: Path, ordinal: int) -> ShardDamaged:
    """Return the error for a shard that ends before a record does."""
    return ShardDamaged(f"ends before record {ordinal} does; prep repair rebuilds it", path=path)


def corrupt(path: Path, ordinal: int, key: bytes) -> CorruptRecord:
    """Return the error for a record of a shard that does not match its checksum."""
    return CorruptRecord(
        f"record {ordinal} does not match its CRC-32C; prep repair rebuilds the shard",
        path=path.parent,
        shard=path.name,
        key=key.decode("utf-8", "replace"),
    )


@dataclass(frozen=True)
class Container:
    """One kind of shard: its writer, its reader, the upper bound of its size, and its library's versions."""

    write: Callable[[Path, Extent], ShardWriter]
    read: Callable[[Path], ShardReader]
    bytes_needed: Callable[[Extent], int]
    library: Callable[[], dict[str, str | int]]
