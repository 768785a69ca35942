"""The downloads of files into a cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from shardprep.formats.dataset.remote.fetching.transfer import Transfer
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.loop_thread import LoopThread, in_thread, run_all
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RemoteFolder, RetryPolicy

from .cache_folder import CacheFolder
from .eviction import hex_of
from .held import Held
from .reserved_part import ReservedPart
from .room import Taken

AT_ONCE = 8


@dataclass
class CachedDownload(Transfer):
    """A part with its room, and the cache that it will be a file of."""

    part: ReservedPart
    folder: CacheFolder
    is_published: bool = field(default=False, kw_only=True)

    async def run(self) -> None:
        """Download the file, verify it and publish it. Raises what :meth:`fill` does."""
        await self.fill(self.part)
        await in_thread(self.part.flush)  # before the turn: it can take long
        await in_thread(self._publish)

    def _publish(self) -> None:
        final = self.folder.path_of(hex_of(self.entry))
        final.parent.mkdir(exist_ok=True)
        with self.folder.turn():
            self.part.publish(final)
            self.part.share()
            self.is_published = True

    def give_up(self) -> None:
        """Let the file go; what is not whole is removed. The caller has its turn in the cache."""
        if self.is_published:
            self.part.close()
        else:
            self.part.remove()


class Downloads(Owned):
    """The thread that downloads files of ``place`` into a cache, and what it has counted. Thread-safe.

    ``files`` with ``bytes`` are whole; ``received_bytes`` also count what is on its way, and what had to be
    asked for again.
    """

    def __init__(self, folder: CacheFolder, place: Location, policy: RetryPolicy) -> None:
        self._folder, self._place, self._policy = folder, place, policy
        self._lock = threading.RLock()
        self._loop: LoopThread | None = None
        self._remote: RemoteFolder | None = None
        self.is_closed = False
        self.files = self.bytes = self.received_bytes = 0

    def run(self, taken: Taken, held: Held) -> None:
        """Download the parts, and hold the files that they become. If one fails, all are let go."""
        if not taken.parts:
            return
        try:
            self._refuse_copy()
            with self._lock:  # a close ends what was begun before it
                loop, remote = self._running()
                works = [
                    CachedDownload(remote, part.entry, part, self._folder, arrived=self._arrived)
                    for part in taken.parts
                ]
                future = loop.begin(self._run(works))
        except BaseException:
            with self._folder.last_turn():
                taken.give_up()
            raise
        try:
            loop.result(future)
        except CancelledError as error:
            raise self.closed() from error
        for work in works:
            held.add(work.entry, work.part.lock)

    async def _run(self, works: Sequence[CachedDownload]) -> None:
        try:
            await run_all(works, AT_ONCE)
        except BaseException:
            await in_thread(self._give_up, works)  # here, where no other thread uses the parts any more
            raise
        self.files += len(works)  # all in this thread
        self.bytes += sum(work.entry.size for work in works)

    def _arrived(self, size: int) -> None:
        self.received_bytes += size

    def _give_up(self, works: Sequence[CachedDownload]) -> None:
        with self._folder.last_turn():
            for work in works:
                work.give_up()

    def _refuse_copy(self) -> None:
        """Raise UsageError in a forked copy, in which a missing thread can have the lock."""
        if not self.made_here:
            raise UsageError(
                "cannot download in a process that was forked from the one that opened it; start this one by "
                "multiprocessing's 'spawn'",
                path=self._folder.path,
            )

    def _running(self) -> tuple[LoopThread, RemoteFolder]:
        """Return the thread for downloads, and the place that they come from. The caller has the lock."""
        if self.is_closed:
            raise self.closed()
        self._remote = self._remote or RemoteFolder(self._place, self._policy)
        self._loop = self._loop or LoopThread(AT_ONCE).__enter__()
        return self._loop, self._remote

    def closed(self) -> UsageError:
        """Return the error of what is asked for after :meth:`close`."""
        return UsageError("the cache is closed", path=self._folder.path)

    def close(self) -> None:
        """End the downloads and the thread. Idempotent."""
        with self._lock:
            self.is_closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            loop.__exit__()
