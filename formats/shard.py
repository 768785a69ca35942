"""What a shard is: the contract of both containers, and how to come by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import CorruptRecord, ShardDamaged, UsageError
from .record import Record, record_crc

if TYPE_CHECKING:
    from .plan import Extent

CONTAINERS = ("lmdb", "hdf5")
SUFFIXES = {"lmdb": ".lmdb", "hdf5": ".h5"}


class Stored(NamedTuple):
    """A record as it lies in a shard: not yet checked against its checksum."""

    key: bytes
    label: int
    crc32c: int
    image: bytes


Memory = npt.NDArray[np.uint8]
Room = Callable[[int], Memory]
"""Gives that many bytes, contiguous and writable, for an image to be read into."""


class Placed(NamedTuple):
    """The same where the caller gave the memory that the image lies in."""

    key: bytes
    label: int
    crc32c: int
    image: Memory


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writes one shard from its first record to its last. Deterministic: same records, same bytes.

    Not thread-safe, not reusable. Leaving the context without error finishes the file (not yet
    flushed to the disk); leaving with one closes it, unfinished.
    """

    @abstractmethod
    def append(self, stored: Stored) -> None:
        """Store the next record. Raises OSError where the disk does."""


class ShardReader(AbstractContextManager["ShardReader"]):
    """Reads one finished shard. Reusable until closed.

    Thread-safe but for :meth:`close`. Raises ShardDamaged where the container is not what it must be,
    CorruptRecord where a record does not match its checksum, OSError where the disk fails.
    """

    path: Path

    @abstractmethod
    def __len__(self) -> int:
        """How many records the shard holds."""

    @abstractmethod
    def stored(self, ordinal: int) -> Stored:
        """The record at an ordinal, unchecked."""

    @abstractmethod
    def placed(self, ordinal: int, room: Room) -> Placed:
        """The record at an ordinal, unchecked, its image copied once: to where ``room`` says."""

    @abstractmethod
    def close(self) -> None:
        """Give back files and maps. Safe to call twice."""

    def checked(self, ordinal: int, *, crc32c: int | None = None) -> Stored:
        """The record at an ordinal, matching its checksum, and the index's where that is given."""
        stored = self.stored(ordinal)
        self._check(ordinal, stored, crc32c)
        return stored

    def image_in(self, ordinal: int, room: Room, *, crc32c: int | None = None) -> Memory:
        """The image at an ordinal, its record checked in the same way, in the memory that ``room`` gives.

        The checksum is that of the copy. ``room`` is called once at the most, and must not use this reader.
        """
        placed = self.placed(ordinal, room)
        self._check(ordinal, placed, crc32c)
        return placed.image

    def _check(self, ordinal: int, found: Stored | Placed, crc32c: int | None) -> None:
        if record_crc(found.key, found.label, found.image) != found.crc32c:
            raise self._corrupt(f"record {ordinal} does not match its CRC-32C", found.key)
        if crc32c not in (None, found.crc32c):
            raise self._corrupt(f"record {ordinal} is not the one in the index", found.key)

    def _corrupt(self, message: str, key_bytes: bytes) -> CorruptRecord:
        key = key_bytes.decode("utf-8", "replace")
        advice = f"{message}; prep repair rebuilds the shard"
        return CorruptRecord(advice, path=self.path.parent, shard=self.path.name, key=key)

    def read(self, ordinal: int, *, crc32c: int | None = None) -> Record:
        """The record at an ordinal, checked in the same way, for the user."""
        stored = self.checked(ordinal, crc32c=crc32c)
        return Record(stored.key.decode(), stored.label, stored.image)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class Container:
    """One kind of shard: how it is written, read, and how much disk it takes at the most."""

    write: Callable[[Path, Extent], ShardWriter]
    read: Callable[[Path], ShardReader]
    bytes_needed: Callable[[Extent], int]
    library: Callable[[], dict[str, str | int]]


def container(name: str) -> Container:
    """The container of that name; its library is imported here and not before."""
    if name == "lmdb":
        from . import lmdb_shard

        return lmdb_shard.CONTAINER
    if name == "hdf5":
        from . import hdf5_shard

        return hdf5_shard.CONTAINER
    raise UsageError(f"unknown shard format {name!r}; known are {', '.join(CONTAINERS)}")


def open_shard(path: Path, name: str, *, size: int, records: int) -> ShardReader:
    """Open a finished shard, checking size before and record count after.

    The size is checked first because a map of a file cut short kills the process (SIGBUS).
    """
    found = path.stat().st_size
    if found != size:
        raise ShardDamaged(f"has {found} bytes, not {size}; prep repair rebuilds it", path=path)
    reader = container(name).read(path)
    if len(reader) != records:
        reader.close()
        raise ShardDamaged(f"has {len(reader)} records, not {records}", path=path)
    return reader
