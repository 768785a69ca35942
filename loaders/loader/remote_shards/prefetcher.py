"""Threads that download files before they are used."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.dataset.remote.caching.file_cache import FileCache
from shardprep.formats.errors import ShardprepError
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.owned import Owned

AT_ONCE = 4
JOIN_TIMEOUT_S = 5.0


class Prefetcher(Owned):
    """Threads that bring files to ``cache``, in the order of their use, as far as there is room.

    A file that has no room, or cannot be downloaded, is tried again when more of the files were used: who
    needs it raises the error. The threads are daemons, and end with :meth:`close`, after that of the cache.
    """

    def __init__(self, cache: FileCache, *, at_once: int = AT_ONCE) -> None:
        self._cache = cache
        self._upcoming: deque[FileEntry] = deque()
        self._changed = threading.Condition()
        self._progress = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name="shardprep-prefetch", daemon=True) for _ in range(at_once)
        ]
        for thread in self._threads:
            with starting_thread():
                thread.start()

    def follow(self, files: Iterable[FileEntry]) -> None:
        """Download these files, instead of what was to come."""
        with self._changed:
            self._upcoming = deque(files)
            self._progressed()

    def progressed(self) -> None:
        """Note that there may be room again."""
        with self._changed:
            self._progressed()

    def _progressed(self) -> None:
        self._progress += 1
        self._changed.notify_all()

    def end(self) -> None:
        """Let the threads end, after what they download."""
        with self._changed:
            self._is_closed = True
            self._upcoming.clear()
            self._progressed()

    def close(self) -> None:
        """End the threads. Idempotent."""
        self.end()
        if not sys.is_finalizing():  # daemons do not run then
            for thread in self._threads:
                thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            files, file, progress = taken
            try:
                is_there = self._cache.prefetch(file)
            except (ShardprepError, OSError):
                is_there = False
            if not is_there:
                self._wait(files, file, progress)

    def _take(self) -> tuple[deque[FileEntry], FileEntry, int] | None:
        """Return the next file, when there is one; None at the end."""
        with self._changed:
            while not self._upcoming and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            return self._upcoming, self._upcoming.popleft(), self._progress

    def _wait(self, files: deque[FileEntry], file: FileEntry, progress: int) -> None:
        """Put a file back, and wait until others were used."""
        with self._changed:
            files.appendleft(file)
            while self._progress == progress:
                self._changed.wait()
