"""Where the files of a flow's dataset come from, in any process that reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.shard_cache import Bring, is_there
from shardprep.formats.dataset.record_set import RecordSet
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.storage.location import Location

if TYPE_CHECKING:  # start-up time: asyncio
    from shardprep.formats.dataset.remote.caching.file_cache import FileCache
    from shardprep.formats.dataset.remote.caching.held import Held


@dataclass(frozen=True)
class FlowFiles:
    """The files of a dataset at a ``url``, through a ``cache`` of ``limit`` bytes; with None they are there.

    Picklable. A process that reads holds one file in each of its threads, until it opens another one.
    """

    url: str | None = None
    cache: Path | None = None
    limit: int | None = None

    @classmethod
    def of(cls, dataset: RecordSet) -> FlowFiles:
        """Return those of a dataset."""
        if "://" not in dataset.location:
            return cls()
        cache: FileCache = dataset.cache  # type: ignore[attr-defined]
        return cls(dataset.location, cache.folder.path, cache.limit_bytes)

    @contextmanager
    def open(self) -> Iterator[Bring]:
        """The context of a function that makes a file be there before it is opened."""
        if self.url is None or self.cache is None:
            yield is_there
            return
        from shardprep.formats.dataset.remote.caching import file_cache  # start-up time: asyncio

        with (
            file_cache.FileCache(self.cache, self.limit, Location.parse(self.url)) as cache,
            closing(_LastOpened(cache)) as opened,
        ):
            yield opened.bring


class _LastOpened(Owned):
    """The file that each thread opened last, which is held: what is open can be read after its eviction."""

    def __init__(self, cache: FileCache) -> None:
        self._cache = cache
        self._held: dict[int, Held] = {}

    def bring(self, entry: FileEntry) -> None:
        thread = threading.get_ident()
        if last := self._held.pop(thread, None):
            last.release()
        self._held[thread] = self._cache.hold([entry])

    def close(self) -> None:
        while self._held:
            self._held.popitem()[1].release()
