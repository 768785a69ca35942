"""The contract of shards in every container: writing and reading."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardDamaged
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


class Addresses(Protocol):
    """The addresses of a shard's records, as its container says them.

    They prove a shard after it was written and when it is verified; an index of format 1.0 has none.
    Thread-safe. Raises ShardDamaged if the container is malformed, and OSError if the system fails, which
    says nothing about the data.
    """

    def __len__(self) -> int:
        """The number of records in the shard."""

    def find(self, ordinal: int) -> Address:
        """Return the record at an ordinal below the length. Its image may end after the end of the file."""


class ColumnAddresses:
    """Addresses in memory, as columns: about 60 bytes for each record."""

    def __init__(self, *columns: npt.NDArray[Any]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def find(self, ordinal: int) -> Address:
        key, label, crc32c, offset, length = (column[ordinal].item() for column in self._columns)
        return key, label, crc32c, offset, length


def place_of(link: Path) -> str:
    """Return the path of the archive that a dataset's link leads to, whether it is there or not."""
    return os.path.realpath(link)


def advice_for(link: Path) -> str:
    """Return what to do about an archive that is not the one that was indexed."""
    return (
        f"make {link} the indexed archive or a link to it, or index what is there with prep index into "
        "another folder"
    )


def not_indexed(link: Path, issue: str) -> ShardDamaged:
    """Return the error for an archive that is not the one that was indexed; it names the archive."""
    return ShardDamaged(f"{issue}; {advice_for(link)}", path=place_of(link))


@dataclass(frozen=True)
class Container:
    """One kind of shard: its writer, addresses, upper bound of its size, and its library's versions."""

    write: Callable[[Path, Extent], ShardWriter]
    addresses: Callable[[Path, ShardFile], Addresses]
    """Return the addresses of the shard with this path, whose images are in this file."""
    bytes_needed: Callable[[Extent], int]
    library: Callable[[], dict[str, str | int]]
