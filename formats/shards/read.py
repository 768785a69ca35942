"""Open shards: the container that a name stands for, and not more open files than the system allows."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from shardprep.formats.errors import CorruptRecord, ShardDamaged, UsageError
from shardprep.formats.records.record import Record
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.shards.container import Container, Indexed, ShardReader
from shardprep.formats.shards.files import FileEntry

CONTAINERS = ("lmdb", "hdf5")
IN_PLACE = "tar"
ALL_CONTAINERS = (*CONTAINERS, IN_PLACE)


def container(name: str) -> Container:
    """Return the container of that name. Raises UsageError for an unknown name."""
    if name == "lmdb":
        from shardprep.formats.shards import (
            lmdb as lmdb_shard,  # start-up time: only the library that is used is imported
        )

        return lmdb_shard.CONTAINER
    if name == "hdf5":
        from shardprep.formats.shards import hdf5 as hdf5_shard  # start-up time

        return hdf5_shard.CONTAINER
    if name == IN_PLACE:
        from shardprep.formats.shards import in_place as tar_table  # start-up time

        return tar_table.CONTAINER
    raise UsageError(f"unknown shard format {name!r}; known are {', '.join(CONTAINERS)}")


def open_shard(path: Path, name: str, *, size: int, records: int) -> ShardReader:
    """Open a finished shard; check its size before and its number of records after."""
    found = path.stat().st_size
    if found != size:
        raise ShardDamaged(f"has {found} bytes, not {size}; prep repair rebuilds it", path=path)
    reader = container(name).read(path)
    if len(reader) != records:
        reader.close()
        raise ShardDamaged(f"has {len(reader)} records, not {records}", path=path)
    return reader


# A quarter of a process's descriptors: 64 with the usual limit of macOS, 256 with that of Linux.
MAX_OPEN = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 4

ShardsOfPart = tuple[Path, str, tuple[FileEntry, ...]]
"""The folder of a dataset, its container, and the entries of its shards."""

DAMAGE = (CorruptRecord, ShardDamaged, OSError)
"""What reading a file raises that its disk did not keep, or that was taken away."""

Result = TypeVar("Result")

_made: weakref.WeakSet[OpenShards] = weakref.WeakSet()


def _free_in_copy() -> None:
    """Unlock in a forked copy of this process, where the threads that opened shards are missing."""
    for shards in _made:
        shards._unlock()


os.register_at_fork(after_in_child=_free_in_copy)


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


class OpenShards(Owned):
    """Readers by shard number, opened at their first use; the least recently used are released.

    At most ``most`` are open, by default MAX_OPEN. Readers of deleted files are released when another one is
    opened; ``files`` makes a file be there. Thread-safe, also in a forked copy of the process. A released
    reader is closed when the last thread that reads from it has finished.

    What :meth:`record` and :meth:`data` cannot read they read :meth:`again`, from a file that is right, if
    ``files`` can replace it. Then they raise what a reader raises.
    """

    def __init__(
        self,
        folder: Path,
        container: str,
        shards: tuple[FileEntry, ...],
        files: LocalFiles = LOCAL,
        *,
        most: int | None = None,
    ) -> None:
        self._own([(folder, container, shards)], files, most)

    @classmethod
    def of_parts(cls, parts: Iterable[ShardsOfPart], files: LocalFiles = LOCAL) -> OpenShards:
        """Return the shards of several datasets, which are numbered one after the other."""
        opened = cls.__new__(cls)
        opened._own(parts, files, None)
        return opened

    def _own(self, parts: Iterable[ShardsOfPart], files: LocalFiles, most: int | None) -> None:
        self._parts = list(parts)
        self._files = files
        self._firsts = [0, *accumulate(len(shards) for _, _, shards in self._parts)]
        self._most = most
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._unlock()
        _made.add(self)

    def _unlock(self) -> None:
        self._lock, self._opening = threading.Lock(), threading.Lock()

    def __getitem__(self, number: int) -> ShardReader:
        if (reader := self._found(number)) is not None:
            return reader
        with self._opening:  # it can download: other threads read what is open
            reader = self._found(number)
            return self._opened(number) if reader is None else reader

    def record(self, number: int, ordinal: int, *, indexed: Indexed) -> Record:
        """Return a record of a shard, as :meth:`.ShardReader.read` does."""
        try:
            return self[number].read(ordinal, indexed=indexed)
        except DAMAGE as error:
            return self.again(number, error, lambda reader: reader.read(ordinal, indexed=indexed))

    def data(self, number: int, ordinal: int, *, indexed: Indexed) -> bytes:
        """Return a value of a column's shard, checked as :meth:`.ShardReader.checked` does."""
        try:
            return self[number].checked(ordinal, indexed=indexed).image
        except DAMAGE as error:
            return self.again(number, error, lambda reader: reader.checked(ordinal, indexed=indexed).image)

    def again(self, number: int, error: Exception, read: Callable[[ShardReader], Result]) -> Result:
        """Read once more: from the file that is there now, if another was open, or from one that is right."""
        if self._files is LOCAL:
            raise error
        with self._lock:
            reader = self._open.pop(number, None)
        if reader is not None and reader.is_deleted:
            try:
                return read(self[number])
            except DAMAGE as again:
                error = again
        with self._files.right(self._place(number)[1], error):
            return read(self._open_now(number))

    def _found(self, number: int) -> ShardReader | None:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            return self._open.get(number)

    def _opened(self, number: int) -> ShardReader:
        _, entry = self._place(number)
        self._release_deleted()
        self._files.bring(entry)
        try:
            return self._open_now(number)
        except DAMAGE as error:
            with self._files.right(entry, error):
                return self._open_now(number)

    def _open_now(self, number: int) -> ShardReader:
        (folder, container, _), entry = self._place(number)
        reader = open_shard(folder / entry.name, container, size=entry.size, records=entry.records)
        with self._lock:
            self._open[number] = reader
            if len(self._open) > (self._most or MAX_OPEN):
                self._open.popitem(last=False)
        return reader

    def _release_deleted(self) -> None:
        with self._lock:
            for deleted in [number for number, reader in self._open.items() if reader.is_deleted]:
                del self._open[deleted]

    def _place(self, number: int) -> tuple[ShardsOfPart, FileEntry]:
        if not 0 <= number < self._firsts[-1]:
            raise IndexError(f"shard {number} of {self._firsts[-1]}")
        part = bisect_right(self._firsts, number) - 1
        return self._parts[part], self._parts[part][2][number - self._firsts[part]]

    def close(self) -> None:
        """Close all readers; the next use opens them again. No other thread may be reading."""
        with self._lock:
            readers, self._open = self._open, OrderedDict()
        for reader in readers.values():
            reader.close()
