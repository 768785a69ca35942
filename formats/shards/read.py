"""Reading records by their addresses: ``pread`` of a shard's file, then the checksum.

Whatever the container, a record is read by its place in the index: shard, offset and length. An index of
format 1.0 has no offsets; then the container says them, once for each record that is read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from shardprep.formats.errors import CorruptRecord, ShardDamaged, UsageError
from shardprep.formats.records.record import MAX_IMAGE_BYTES, record_crc
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.shards.container import (
    Address,
    Addresses,
    Container,
    Memory,
    Room,
    StoredRecord,
    advice_for,
    not_indexed,
    place_of,
)
from shardprep.formats.shards.files import FileEntry, ShardFile
from shardprep.formats.shards.in_place import ARCHIVE_NAME

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
