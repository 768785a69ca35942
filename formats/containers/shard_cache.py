"""The open shards of a process, not more than the system allows."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

from shardprep.formats.system.owned import Owned

from .container import ShardReader
from .published_file import FileEntry
from .registry import open_shard

# A quarter of a process's descriptors: 64 with the usual limit of macOS, 256 with that of Linux.
MAX_OPEN = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 4

ShardsOfPart = tuple[Path, str, tuple[FileEntry, ...]]
"""The folder of a dataset, its container, and the entries of its shards."""

Bring = Callable[[FileEntry], None]
"""``bring(entry)`` is called before a file of a dataset is opened, and makes it be there."""

_made: weakref.WeakSet[OpenShards] = weakref.WeakSet()


def _free_in_copy() -> None:
    """Unlock in a forked copy of this process, where the threads that opened shards are missing."""
    for shards in _made:
        shards._unlock()


os.register_at_fork(after_in_child=_free_in_copy)


def is_there(entry: FileEntry) -> None:
    """Do nothing: the files of a dataset on this machine are there."""


class OpenShards(Owned):
    """Readers by shard number, opened at their first use; the least recently used are released.

    At most ``most`` are open, by default MAX_OPEN. Readers of deleted files are released when another one is
    opened, as they hold space on the disk; ``bring`` makes a file be there. Thread-safe, also in a forked
    copy of the process. A released reader is closed when the last thread that reads from it has finished.
    """

    def __init__(
        self,
        folder: Path,
        container: str,
        shards: tuple[FileEntry, ...],
        bring: Bring = is_there,
        *,
        most: int | None = None,
    ) -> None:
        self._own([(folder, container, shards)], bring, most)

    @classmethod
    def of_parts(cls, parts: Iterable[ShardsOfPart], bring: Bring = is_there) -> OpenShards:
        """Return the shards of several datasets, which are numbered one after the other."""
        opened = cls.__new__(cls)
        opened._own(parts, bring, None)
        return opened

    def _own(self, parts: Iterable[ShardsOfPart], bring: Bring, most: int | None) -> None:
        self._parts = list(parts)
        self._bring = bring
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

    def _found(self, number: int) -> ShardReader | None:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            return self._open.get(number)

    def _opened(self, number: int) -> ShardReader:
        if not 0 <= number < self._firsts[-1]:
            raise IndexError(f"shard {number} of {self._firsts[-1]}")
        part = bisect_right(self._firsts, number) - 1
        folder, container, shards = self._parts[part]
        entry = shards[number - self._firsts[part]]
        self._release_deleted()
        self._bring(entry)
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

    def close(self) -> None:
        """Close all readers; the next use opens them again. No other thread may be reading."""
        with self._lock:
            readers, self._open = self._open, OrderedDict()
        for reader in readers.values():
            reader.close()
