"""The shards that a process has open: as many as it reads from, and not more than the system allows."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from pathlib import Path

from .manifest import FileEntry
from .shard import ShardReader, open_shard

# A quarter of the descriptors that a process may have: 64 with macOS' usual limit, 256 with Linux'.
MAX_OPEN = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 4


class OpenShards:
    """Readers by shard number, opened when first asked for, the least recently used let go.

    Thread-safe. A reader that is let go is closed when the last one who reads from it is done.
    """

    def __init__(self, folder: Path, container: str, shards: tuple[FileEntry, ...]) -> None:
        self._folder = folder
        self._container = container
        self._shards = shards
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> ShardReader:
        with self._lock:
            reader = self._open[number] if number in self._open else self._opened(number)
            self._open.move_to_end(number)
            return reader

    def _opened(self, number: int) -> ShardReader:
        entry = self._shards[number]
        path = self._folder / entry.name
        reader = open_shard(path, self._container, size=entry.size, records=entry.records)
        self._open[number] = reader
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return reader

    def close(self) -> None:
        """Close all; asking for one opens it again. No other thread may be reading."""
        with self._lock:
            readers, self._open = self._open, OrderedDict()
        for reader in readers.values():
            reader.close()
