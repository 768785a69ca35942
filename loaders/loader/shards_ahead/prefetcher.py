"""Threads that download files before they are used."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Sequence

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.dataset.remote.caching.file_cache import FileCache
from shardprep.formats.errors import ShardprepError
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.owned import Owned

AT_ONCE = 4
MOST_AHEAD = 8
JOIN_TIMEOUT_S = 5.0


class Prefetcher(Owned):
    """Threads that bring files to ``cache``, in the order of their use, as far as there is room.

    Others are evicted for the next ``ahead`` files only: for more, files would go that the next epoch needs,
    and more would be downloaded in all. A file that has no room, or cannot be downloaded, is tried again when
    more of the files were used; what needs it raises the error. The threads are daemons, and end with
    :meth:`close`, after that of the cache.
    """

    def __init__(self, cache: FileCache, *, ahead: int, at_once: int = AT_ONCE) -> None:
        self._cache = cache
        self._ahead = ahead
        self._begun = self._over = 0
        self._has_room = True
        self._files: Sequence[FileEntry] = ()
        self._next = 0
        self._put_back: list[int] = []
        self._there: set[int] = set()
        self._changed = threading.Condition()
        self._progress = 0
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        try:
            self._begin(at_once)
        except BaseException:
            self.close()
            raise

    def _begin(self, at_once: int) -> None:
        for _ in range(at_once):
            thread = threading.Thread(target=self._run, name="shardprep-prefetch", daemon=True)
            with starting_thread():
                thread.start()
            self._threads.append(thread)

    def follow(self, files: Sequence[FileEntry]) -> None:
        """Download these files, instead of what was to come."""
        with self._changed:
            self._files, self._next, self._put_back, self._there = files, 0, [], set()
            self._begun, self._has_room = 0, True
            self._progressed()

    def skip_to(self, begun: int, over: int) -> None:
        """Note that the first ``begun`` files are in use, or were, and that ``over`` uses have ended."""
        with self._changed:
            if (begun, over) == (self._begun, self._over):
                return
            self._begun, self._over = begun, over
            self._next = max(self._next, begun)
            self._put_back = [number for number in self._put_back if number >= begun]
            heapq.heapify(self._put_back)
            self._there = {number for number in self._there if number >= begun}
            self._progressed()

    @property
    def ahead(self) -> int:
        """The number of files that were brought, and are not in use yet."""
        return len(self._there)

    def _progressed(self) -> None:
        self._progress += 1
        self._changed.notify_all()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if not self.made_here:  # else the lock can be held by a thread that was not copied
            return
        with self._changed:
            self._is_closed = True
            self._progressed()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            files, number, progress = taken
            is_near = number < self._begun + self._ahead
            try:
                is_there = self._cache.prefetch(files[number], evict=is_near)
            except (ShardprepError, OSError):
                is_there = False
            if is_there:
                self._note(files, number)
            else:
                self._wait(files, number, progress)

    def _take(self) -> tuple[Sequence[FileEntry], int, int] | None:
        """Return the number of the next file among all, when there is one; None at the end."""
        with self._changed:
            while not self._is_closed:
                number = min([*self._put_back[:1], self._next])
                if number < min(len(self._files), self._reach):
                    self._drop(number)
                    return self._files, number, self._progress
                self._changed.wait()
            return None

    @property
    def _reach(self) -> float:
        """The number of the first file that is not to be downloaded now."""
        return math.inf if self._has_room else self._begun + self._ahead

    def _drop(self, number: int) -> None:
        if number == self._next:
            self._next += 1
        else:
            heapq.heappop(self._put_back)

    def _note(self, files: Sequence[FileEntry], number: int) -> None:
        with self._changed:
            if files is self._files and number >= self._begun:
                self._there.add(number)

    def _wait(self, files: Sequence[FileEntry], number: int, progress: int) -> None:
        """Put a file back, and wait until others were used."""
        with self._changed:
            if files is self._files:
                heapq.heappush(self._put_back, number)
                self._has_room = False
            while self._progress == progress:
                self._changed.wait()
