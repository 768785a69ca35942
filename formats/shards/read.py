"""The contract of shards in every container, and reading by address: ``pread`` of a file, then the checksum.

Whatever the container, a record is read by its place in the index: shard, offset and length. An index of
format 1.0 has no offsets; then the container says them, once for each record that is read.
"""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import CorruptRecord, ShardDamaged, UsageError
from shardprep.formats.records.record import MAX_IMAGE_BYTES, record_crc
from shardprep.formats.runtime.lazy import cached_property
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.shards.files import ARCHIVE_NAME, FileEntry, ShardFile

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


CONTAINERS = ("lmdb", "hdf5")
IN_PLACE = "tar"
ALL_CONTAINERS = (*CONTAINERS, IN_PLACE)
_MODULES = {  # start-up time: only the library that is used is imported
    "lmdb": "shardprep.formats.shards.lmdb",
    "hdf5": "shardprep.formats.shards.hdf5",
    IN_PLACE: "shardprep.formats.shards.in_place",
}


def container(name: str) -> Container:
    """Return the container of that name. Raises UsageError for an unknown name."""
    if name not in _MODULES:
        raise UsageError(f"unknown shard format {name!r}; known are {', '.join(CONTAINERS)}")
    found: Container = import_module(_MODULES[name]).CONTAINER
    return found


Image = TypeVar("Image", bytes, Memory)


class Shard(Owned, AbstractContextManager["Shard"]):
    """The open file of a shard; records are read by their addresses. Thread-safe except to close.

    ``entry`` is what the manifest lists; without it, all that the container says is read at once. Raises
    ShardDamaged for a file that is not as long as the entry says, is malformed or ends before a record,
    CorruptRecord for a record that does not match its checksum, and OSError if the system fails or memory is
    short. Each error names the record. A file that changes while it is open gives an error, never a signal.
    """

    instead = "open the dataset again by its path"

    def __init__(self, path: Path, container: str, entry: FileEntry | None = None) -> None:
        self.path = path
        self._container = container
        self._listed = entry.records if entry else None
        in_place = container == IN_PLACE
        images = path.with_name(ARCHIVE_NAME) if in_place else path
        try:
            self.file = ShardFile(images)
        except FileNotFoundError as error:
            if not in_place:
                raise
            raise not_indexed(images, "is not there") from error
        try:
            if entry is None:
                self._addresses  # noqa: B018 - read and checked here
            elif not in_place and self.file.size != entry.size:
                message = f"has {self.file.size} bytes, not {entry.size}; prep repair rebuilds it"
                raise ShardDamaged(message, path=path)
        except BaseException:
            self.close()
            raise

    @cached_property
    def _addresses(self) -> Addresses:
        try:
            found = container(self._container).addresses(self.path, self.file)
        except MemoryError as error:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), os.fspath(self.path)) from error
        if self._listed not in (None, len(found)):
            raise ShardDamaged(f"has {len(found)} records, not {self._listed}", path=self.path)
        return found

    @property
    def records(self) -> int:
        """The number of records in the shard, as the container says."""
        return len(self._addresses)

    def address(self, ordinal: int) -> Address:
        """Return the key, label, checksum and place of the record at an ordinal, as the container says."""
        try:
            if 0 <= ordinal < self.records:
                return self._addresses.find(ordinal)
        except (OSError, MemoryError) as error:
            raise self._unread(ordinal, error) from error
        raise ShardDamaged(f"has no record {ordinal}", path=self.path)

    def checked(self, ordinal: int) -> StoredRecord:
        """Return the record at an ordinal, as the container says, checked against its checksum."""
        address = self.address(ordinal)
        key, label, crc32c, offset, length = address
        if length > MAX_IMAGE_BYTES:
            raise ShardDamaged(f"gives record {ordinal} a length that no image has", path=self.path)
        image = self._checked(ordinal, address, self.file.read_at)
        return StoredRecord(key, label, crc32c, image, offset)

    def image(self, ordinal: int, address: Address) -> bytes:
        """Return the image at an address, its record checked against its checksum."""
        found = address if address[3] else self._located(ordinal, address)
        return self._checked(ordinal, found, self.file.read_at)

    def image_in(self, ordinal: int, address: Address, room: Room) -> Memory:
        """Return the image in the memory of ``room(length)``, its record checked from this copy."""

        def read_at(length: int, offset: int) -> Memory:
            memory = room(length)
            count = self.file.read_into(memory.data, offset)
            return memory if count == length else memory[:count]

        found = address if address[3] else self._located(ordinal, address)
        return self._checked(ordinal, found, read_at)

    def _located(self, ordinal: int, address: Address) -> Address:
        """Return an address of format 1.0 with the offset that the container says."""
        found = self.address(ordinal)
        if found[:3] != address[:3] or found[4] != address[4]:
            raise self._corrupt(ordinal, address[0])
        return found

    def _checked(self, ordinal: int, address: Address, read_at: Callable[[int, int], Image]) -> Image:
        """Return the image that ``read_at(length, offset)`` reads, its record checked."""
        key, label, crc32c, offset, length = address
        if offset + length > self.file.size:
            raise self._cut_off(ordinal)
        try:
            image = read_at(length, offset)
        except (OSError, MemoryError) as error:
            raise self._unread(ordinal, error) from error
        if len(image) != length:
            raise self._cut_off(ordinal)
        if record_crc(key, label, image) != crc32c:
            raise self._corrupt(ordinal, key)
        return image

    def _unread(self, ordinal: int, error: OSError | MemoryError) -> OSError:
        """Return the error for a record that the system did not read, or has no memory for."""
        number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno or errno.EIO
        return OSError(number, f"{os.strerror(number)}, at record {ordinal}", os.fspath(self.file.path))

    def _cut_off(self, ordinal: int) -> ShardDamaged:
        """Return the error for a shard, or its archive, that ends before a record does."""
        if self.file.path != self.path:
            return not_indexed(self.file.path, f"ends before record {ordinal} of {self.path.name} does")
        return ShardDamaged(f"ends before record {ordinal} does; prep repair rebuilds it", path=self.path)

    def _corrupt(self, ordinal: int, key: bytes) -> CorruptRecord:
        """Return the error for a record of a shard, or in its archive, that does not match its checksum."""
        place: str | Path = self.path.parent
        advice = "; prep repair rebuilds the shard"
        if self.file.path != self.path:
            place = place_of(self.file.path)
            advice = f": the archive, or its table, has changed; {advice_for(self.file.path)}"
        return CorruptRecord(
            f"record {ordinal} does not match its CRC-32C{advice}",
            path=place,
            shard=self.path.name,
            key=key.decode("utf-8", "replace"),
        )

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.file.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


DAMAGE = (CorruptRecord, ShardDamaged, OSError)
"""What reading a file raises that its disk did not keep, or that was taken away."""


class LocalFiles:
    """The files of a dataset in a folder of this machine: they are there as they are."""

    def bring(self, entry: FileEntry) -> None:
        """Make a file be there; called before it is opened."""

    def right(self, entry: FileEntry, error: Exception) -> AbstractContextManager[None]:
        """The context in which a file is there and right, after reading it raised ``error``.

        Raises that where it cannot be replaced.
        """
        raise error


LOCAL = LocalFiles()
