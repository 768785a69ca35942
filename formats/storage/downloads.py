"""Downloads into a cache: room is made first, and a file is held until it is let go."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardprep.formats.errors import NoSpace, UsageError
from shardprep.formats.runtime.files import OPEN_FLAGS
from shardprep.formats.runtime.loop_thread import LoopThread, in_thread, run_all
from shardprep.formats.runtime.owned import LockDescriptor, Owned
from shardprep.formats.shards.files import FileEntry
from shardprep.formats.storage.cache_folder import (
    CachedFile,
    CacheFolder,
    ReservedPart,
    eviction_order,
    hex_of,
    identity_of,
    living_readers,
    nearest,
    remove_file,
)
from shardprep.formats.storage.store import Location, RemoteFolder, RetryPolicy
from shardprep.formats.storage.transfer import Transfer


class CacheTooSmall(NoSpace):
    """A cache is too small for the files that are read at once; ``needed`` is the least limit."""

    def __init__(self, message: str, *, path: os.PathLike[str] | None = None, needed: int = 0) -> None:
        super().__init__(message, path=path)
        self.needed = needed


Evict = Literal["any", "later", "none"]

SPARE_BYTES = 1 << 20  # of the disk, for the cache's notes beside its files


@dataclass
class DownloadPlan:
    """Missing files and their fate: ``parts`` with their room, and those that are ``coming`` by others."""

    parts: list[ReservedPart] = field(default_factory=list)
    coming: list[FileEntry] = field(default_factory=list)

    def begin(self, folder: CacheFolder, entries: Iterable[FileEntry], files: Iterable[CachedFile]) -> None:
        """Make parts for the files that are neither there nor on their way. The caller has its turn."""
        there = {file.name: file.size for file in files}
        for entry in entries:
            if there.get(hex_of(entry)) == entry.size:
                self.coming.append(entry)  # since the caller looked
                continue
            try:
                self.parts.append(ReservedPart(folder.part_of(hex_of(entry)), entry))
            except FileExistsError:
                self.coming.append(entry)

    def give_up(self) -> None:
        """Remove the parts. The caller has its turn."""
        while self.parts:
            self.parts.pop().remove()


@dataclass(frozen=True)
class NoRoom:
    """The cache is too small now: the ``least`` limit that would do, and the state of the cache.

    ``is_full`` says that the disk is full of other files. ``state`` is another one as soon as any
    reader has moved on.
    """

    least: int
    limit: int
    is_full: bool
    state: tuple[object, ...]


def take_room(
    folder: CacheFolder, entries: Sequence[FileEntry], limit: int, *, evict: Evict = "any"
) -> DownloadPlan | NoRoom:
    """Take the room of all the files that are neither there nor on their way, or of none.

    ``limit`` is that of the caller; of those of all living readers the smallest holds. Files that are pinned
    stay; ``evict`` says which others go: any, those that are used later than the one entry, or none. Raises
    OSError.
    """
    taken = DownloadPlan()
    with folder.turn():
        readers, disk = [*living_readers(folder.readers)], shutil.disk_usage(folder.path)
        limit = min([limit, disk.total, *(reader.limit for reader in readers)])
        coming, files = folder.remove_leftovers(), folder.cached()
        try:
            taken.begin(folder, entries, files)
            wanted = sum(part.entry.size for part in taken.parts)
            used = coming + sum(file.size for file in files)
            lacking_on_disk = wanted + SPARE_BYTES - disk.free if wanted else 0
            lacking = max(used + wanted - limit, lacking_on_disk)
            freed = _evict(_evictable(files, entries, nearest(readers), evict), lacking)
            if freed >= lacking and all(map(_has_room, taken.parts)):
                return taken
        except BaseException:
            taken.give_up()
            raise
        taken.give_up()
        state = {file.name for file in files}, coming, [reader.position for reader in readers]
        if freed >= lacking:
            return NoRoom(0, limit, is_full=True, state=state)
        least = used + wanted - freed
        return NoRoom(least, limit, is_full=freed < lacking_on_disk and least <= limit, state=state)


def _evictable(
    files: Iterable[CachedFile], entries: Sequence[FileEntry], distances: Mapping[int, float], evict: Evict
) -> list[CachedFile]:
    """Return the files that may go for the entries, in the order in which they do."""
    if evict == "none":
        return []
    bound = distances.get(identity_of(hex_of(entries[0])), math.inf) if evict == "later" else -1
    keep = {hex_of(entry) for entry in entries}
    others = [file for file in files if file.name not in keep]
    return eviction_order(
        (file for file in others if distances.get(identity_of(file.name), math.inf) > bound), distances
    )


def room_on_disk(folder: CacheFolder) -> int:
    """Return the bytes that the files of a cache have, with what is free on its disk."""
    with folder.turn():
        cached = sum(file.size for file in folder.cached()) + folder.remove_leftovers()
        return max(0, cached + shutil.disk_usage(folder.path).free - SPARE_BYTES)


def _evict(files: Sequence[CachedFile], lacking: int) -> int:
    """Remove the first files on which there is no lock, as many as are needed, or none if all are too few.

    Return the bytes that were, or could have been, removed.
    """
    free = sum(file.size for file in files if _unless_pinned(file, lambda *_: None)) if lacking > 0 else 0
    if free < lacking:
        return free
    freed = 0
    for file in files:
        if freed >= lacking:
            break
        freed += file.size if _unless_pinned(file, remove_file) else 0
    return freed


def _unless_pinned(file: CachedFile, call: Callable[[Path, LockDescriptor], None]) -> bool:
    """Call unless a reader has a lock on the file; return whether none has."""
    with closing(LockDescriptor(os.open(file.path, OPEN_FLAGS | os.O_NOFOLLOW))) as lock:
        if is_free := lock.lock(wait=False):
            call(file.path, lock)
        return is_free


def _has_room(part: ReservedPart) -> bool:
    """Take the room of a part; return whether the disk has it, which it alone knows."""
    try:
        part.reserve()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


class FileHold(Owned, AbstractContextManager["FileHold"]):
    """Files in the cache that are not evicted before :meth:`release`, or the end of this process."""

    def __init__(self) -> None:
        self._pins: dict[str, LockDescriptor] = {}
        self.came = False
        """Whether any of the files had to come first."""
        self.sizes: dict[str, int] = {}
        """The sizes of the files in bytes, by their SHA-256."""

    def add(self, entry: FileEntry, pin: LockDescriptor) -> None:
        """Hold a file by its lock."""
        self._pins[hex_of(entry)] = pin
        self.sizes[hex_of(entry)] = entry.size

    def pin_of(self, entry: FileEntry) -> LockDescriptor:
        """Return the lock on a file that is held."""
        return self._pins[hex_of(entry)]

    def lacks(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        """Return the files that are not held."""
        return [entry for entry in entries if hex_of(entry) not in self._pins]

    def take(self, other: FileHold) -> None:
        """Take over the files of the other one, which holds nothing afterwards."""
        replaced = [self._pins[name] for name in other._pins.keys() & self._pins.keys()]
        self._pins |= other._pins
        self.sizes |= other.sizes
        other._pins, other.sizes = {}, {}
        for pin in replaced:
            pin.close()

    def release(self) -> None:
        """Let the files go. Idempotent."""
        pins, self._pins, self.sizes = self._pins, {}, {}
        for pin in pins.values():
            pin.close()

    def __exit__(self, *exc: object) -> None:
        self.release()


AT_ONCE = 8
ALIVE_S = 10.0


@dataclass
class CachedDownload(Transfer):
    """A part with its room, and the cache that it will be a file of."""

    part: ReservedPart
    folder: CacheFolder
    is_published: bool = field(default=False, kw_only=True)

    async def run(self) -> None:
        """Download the file, verify it and publish it. Raises what :meth:`fill` does."""
        alive = asyncio.create_task(self._show_alive())
        try:
            await self.fill(self.part)
            await in_thread(self.part.flush)  # before the turn: it can take long
            await in_thread(self._publish)
        finally:
            alive.cancel()

    async def _show_alive(self) -> None:
        """Change the part's time as long as this process runs, also while the server is silent."""
        while True:
            await asyncio.sleep(ALIVE_S)
            self.part.touch()

    def _publish(self) -> None:
        final = self.folder.path_of(hex_of(self.entry))
        final.parent.mkdir(exist_ok=True)
        with self.folder.turn():
            self.part.publish(final)
            self.part.share()
            self.is_published = True

    def give_up(self) -> None:
        """Let the file go; an incomplete one is removed. The caller has its turn in the cache."""
        if self.is_published:
            self.part.close()
        else:
            self.part.remove()


class Downloads(Owned):
    """The thread that downloads files of ``place`` into a cache, and its counts. Thread-safe.

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

    def run(self, taken: DownloadPlan, held: FileHold) -> None:
        """Download the parts, and hold the files that they become. If one fails, all are let go."""
        if not taken.parts:
            return
        try:
            self._refuse_copy()
            with self._lock:  # a close ends earlier downloads
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
        """Raise UsageError in a forked copy, where a missing thread may have the lock."""
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
        """Return the error for calls after :meth:`close`."""
        return UsageError("the cache is closed", path=self._folder.path)

    def close(self) -> None:
        """End the downloads and the thread. Idempotent."""
        with self._lock:
            self.is_closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            loop.__exit__()
