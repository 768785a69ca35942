"""The files of a cache that an open dataset holds."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.system.owned import Owned

from .eviction import hex_of
from .file_cache import FileCache
from .held import Held

MOST = 4  # the others stay open, and can be evicted: a dataset that is idle takes little room from others


class ShardPins(Owned):
    """The files that were opened last, held; fewer of them where there is no room.

    ``cache`` returns the cache. Thread-safe; a forked copy of the process begins with none.
    """

    def __init__(self, cache: Callable[[], FileCache]) -> None:
        self._cache = cache
        self._clear()

    def _clear(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Held] = OrderedDict()

    def _here(self) -> threading.Lock:
        if self._process != os.getpid():
            self._clear()
        return self._lock

    def bring(self, entry: FileEntry) -> None:
        """Make a file be there, and hold it. Raises what :meth:`FileCache.hold` does."""
        with self._here():
            held = self._held.pop(hex_of(entry), None) or self._brought(entry)
            self._held[hex_of(entry)] = held
            if len(self._held) > MOST:
                self._let_go_first()

    def _brought(self, entry: FileEntry) -> Held:
        cache = self._cache()
        while self._held:
            if (held := cache.hold_now([entry])) is not None:
                return held
            self._let_go_first()
        return cache.hold([entry])

    def _let_go_first(self) -> None:
        self._held.popitem(last=False)[1].release()

    def release(self) -> None:
        """Let all go."""
        with self._here():
            while self._held:
                self._let_go_first()
