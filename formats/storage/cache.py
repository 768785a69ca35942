"""A cache of verified files of remote datasets, shared by all processes of a machine; datasets read from it.

``FileCache`` stores the files; ``FileSource`` tells any process where a dataset's files come from.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.errors import (
    CorruptRecord,
    ManifestDamaged,
    NoSpace,
    ShardDamaged,
    SourceDamaged,
    UsageError,
)
from shardprep.formats.runtime.files import errors_as_no_space, full_disk_error, hash_descriptor
from shardprep.formats.runtime.loop_thread import LoopThread, call_in_thread, run_all
from shardprep.formats.runtime.owners import Closable, LockDescriptor, Owner
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.dataset import Dataset, RecordSet
from shardprep.formats.shards.manifest import INDEX_NAME, Manifest, tables_of
from shardprep.formats.shards.read import LOCAL, FileEntry, LocalFiles
from shardprep.formats.storage.cache_folder import (
    PATIENCE_S,
    ArrivingFile,
    CacheFolder,
    Evict,
    NoRoom,
    Patience,
    ReaderFile,
    hex_of,
    identity_of,
)
from shardprep.formats.storage.store import PATIENT, Location, RemoteDenied, RemoteFolder, RetryPolicy
from shardprep.formats.storage.transfer import HashedBytes, fill, remote_dataset

AT_ONCE = 8  # downloads
ALIVE_S = 10.0
FULL_DISK_PATIENCE_S = 30.0
UNLIMITED = 1 << 62

MakeRoom = Callable[[], bool]
"""Releases something that takes up room; returns False if nothing was left to release."""


class FileHold(Owner, AbstractContextManager["FileHold"]):
    """Cached files that are not evicted until :meth:`release`, or the end of this process."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[FileEntry, LockDescriptor]] = {}
        self.has_downloaded = False
        """Whether any of the files had to be downloaded first."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the files in bytes, by SHA-256."""
        return {name: entry.size for name, (entry, _) in self._files.items()}

    def add(self, entry: FileEntry, pin: LockDescriptor) -> None:
        """Hold a file by its lock."""
        self._files[hex_of(entry)] = entry, pin

    def pin_of(self, entry: FileEntry) -> LockDescriptor:
        return self._files[hex_of(entry)][1]

    def missing(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        return [entry for entry in entries if hex_of(entry) not in self._files]

    def release(self) -> None:
        """Release the files. Idempotent."""
        files, self._files = self._files, {}
        for _, pin in files.values():
            pin.close()

    def __exit__(self, *exc: object) -> None:
        self.release()


class CacheTooSmall(NoSpace):
    """A cache is too small for the files that are read at once; ``needed`` is the smallest limit in bytes."""

    def __init__(self, message: str, *, path: os.PathLike[str] | None = None, needed: int = 0) -> None:
        super().__init__(message, path=path)
        self.needed = needed


@dataclass(frozen=True)
class CacheCounts:
    """Counts since the cache was opened.

    ``downloaded`` files of ``downloaded_bytes`` were downloaded by this object; ``received_bytes`` include
    unfinished downloads and retries. ``hits`` were already there when requested, or downloaded by another
    process. ``replaced`` copies were discarded, by any process, because the disk had corrupted them.
    """

    downloaded: int = 0
    downloaded_bytes: int = 0
    received_bytes: int = 0
    hits: int = 0
    replaced: int = 0


class FileCache(Owner, Closable):
    """The files of the dataset at ``place``, each downloaded once for all processes of this machine.

    ``folder`` is a new folder or an existing cache on a local disk. Its files, of all datasets, take at most
    ``limit_bytes`` together; of different limits of living readers, the smallest applies. A file is there
    whole and verified, or not at all; leftovers of dead processes are removed. Thread-safe. A forked copy
    holds existing files, but cannot download. Close it at the end: it has a thread, and a file that announces
    its future uses to other processes.

    Raises UsageError for a folder that is not a cache, or is on a network file system; NoSpace for a full
    disk; CacheBusy, as all methods may, if another process keeps a lock for ``patience_s`` seconds; OSError.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: int | None,
        place: Location,
        *,
        policy: RetryPolicy = PATIENT,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.folder = CacheFolder(user_path(folder).absolute(), patience_s)
        self.limit_bytes = min(UNLIMITED, UNLIMITED if limit_bytes is None else limit_bytes)
        self.place = place
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._policy = policy
        self._loop: LoopThread | None = None
        self._remote: RemoteFolder | None = None
        self._is_closed = False
        self._kept: list[FileHold] = []
        self._files = self._bytes = self._received_bytes = self._hits = 0
        with errors_as_no_space(self.folder.path):
            self.folder.make()
            with self.folder.critical_section():
                name = f"{os.getpid()}-{secrets.token_hex(8)}"
                self._reader = ReaderFile(self.folder.readers, name, self.limit_bytes)
            self.folder.reserve_room((), self.limit_bytes)  # removes leftovers, and files beyond the limit
        self._replaced = self.folder.replaced

    @property
    def counts(self) -> CacheCounts:
        replaced = max(0, self.folder.replaced - self._replaced)
        return CacheCounts(self._files, self._bytes, self._received_bytes, self._hits, replaced)

    @property
    def room_bytes(self) -> int:
        """The bytes that all cached files together can take now: the limit, or the disk's space."""
        return min(self.limit_bytes, self.folder.room_bytes)

    def check_fits(self, entries: Iterable[FileEntry]) -> None:
        """Raise CacheTooSmall if one of these files can never be in the cache."""
        for entry in entries:
            self._check_fit([entry])

    def hold(self, entries: Iterable[FileEntry], make_room: MakeRoom = lambda: False) -> FileHold:
        """Hold files, downloading the missing ones; waits until there is room.

        It holds none of them while it waits for room, so two readers never deadlock with half a set each.
        Release earlier sets first, or in ``make_room``, which is called if there is no room.

        Raises CacheTooSmall if the limit is less than these files and those this process keeps, or if nothing
        changed in the cache for ``patience_s`` seconds; NoSpace for a disk that others have filled;
        RemoteDamaged, RemoteMissing, RemoteFailed; UsageError for missing files in a forked process; OSError.
        """
        wanted = self._check_fit(entries)
        patience = Patience(self._patience_s, f"room in the cache {self.folder.path}, which others read from")
        while isinstance(result := self._try_hold(wanted), NoRoom):
            if make_room():
                continue
            self._refuse_closed()
            idle_s = patience.pause(result.state)
            if result.full and idle_s >= min(FULL_DISK_PATIENCE_S, self._patience_s):
                raise full_disk_error(self.folder.path, result.full)
            if self._bytes_needed(wanted) > result.limit or idle_s >= self._patience_s:
                raise self._too_small_error(max(result.least, self._bytes_needed(wanted)), result.limit)
        return result

    def hold_cached(self, entries: Sequence[FileEntry]) -> FileHold | None:
        """Hold files that are in the cache; None, without holding any, if one is missing."""
        held = FileHold()
        if self._hold_cached(held, entries):
            held.release()
            return None
        self._hits += len(entries)
        return held

    def keep(self, held: FileHold) -> None:
        """Keep held files until this cache is closed. Raises UsageError for a closed cache."""
        with self._lock:
            if self._is_closed:
                held.release()  # at once: a kept error, as in a notebook, would pin the files
            self._refuse_closed()
            self._kept.append(held)

    def prefetch(self, entry: FileEntry, *, evict: bool = True) -> bool:
        """Download a file ahead of its use, without holding it; return whether it is there.

        Only files that are used later, according to all readers, are evicted for it; without ``evict``, none
        are. Raises the errors of :meth:`hold` except CacheTooSmall.
        """
        result = self._try_hold([entry], "later" if evict else "none")
        if isinstance(result, NoRoom):
            return False
        result.release()
        return True

    def hold_intact(self, entry: FileEntry, make_room: MakeRoom = lambda: False) -> FileHold:
        """Hold a file as :meth:`hold` does, after hashing it: a corrupt copy is replaced."""
        held = self.hold([entry], make_room)
        with suppress(OSError):  # a bad sector
            if held.has_downloaded or hash_descriptor(held.pin_of(entry).fileno()) == entry.sha256:
                return held
        with held:
            self.folder.discard(entry, held.pin_of(entry))
        return self.hold([entry], make_room)

    def check_published(self, entry: FileEntry) -> None:
        """Hash a file at the place, whatever is cached. Raises RemoteDamaged, RemoteMissing, RemoteFailed."""
        self._wait_for(*self._start(lambda remote: fill(remote, entry, HashedBytes())))

    def announce(self, entries: Sequence[FileEntry]) -> None:
        """Announce to all processes the files that this one will use, in order, instead of earlier ones.

        Raises UsageError for a closed cache.
        """
        uses = np.array([identity_of(hex_of(entry)) for entry in entries], np.uint64)
        with self._lock:
            self._refuse_closed()
            with self.folder.critical_section():
                self._reader.announce(uses)

    def record_position(self, position: int) -> None:
        """Record that the first ``position`` announced uses are done. Raises UsageError once closed."""
        with self._lock:
            self._refuse_closed()
            self._reader.record_position(position)

    def close(self) -> None:
        """Release all files and stop the threads. Idempotent; not reusable afterwards."""
        if not self.was_made_here or self._is_closed:
            return
        with self._lock:
            self._is_closed = True
            for held in self._kept:
                held.release()
        if self._loop is not None:
            self._loop.cancel()
            self._loop.__exit__()
        self._reader.remove()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError("the cache is closed", path=self.folder.path)

    def _check_fit(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        """Return the files without duplicates. Raises CacheTooSmall if they can never fit together."""
        wanted = [*{hex_of(entry): entry for entry in entries}.values()]
        if (needed := self._bytes_needed(wanted)) > self.limit_bytes:
            raise self._too_small_error(needed, self.limit_bytes)
        return wanted

    def _bytes_needed(self, wanted: Iterable[FileEntry]) -> int:
        """Return the bytes of these files and the kept ones together."""
        sizes = {hex_of(entry): entry.size for entry in wanted}
        for held in self._kept:
            sizes |= held.sizes
        return sum(sizes.values())

    def _too_small_error(self, needed: int, limit: int) -> CacheTooSmall:
        room = f"{limit:,} bytes" if limit < UNLIMITED else "no more"
        return CacheTooSmall(
            f"the cache is too small: it has room for {room} and needs at least {needed:,} bytes "
            "for the files read at once; give it a larger limit, or make room on its disk",
            path=self.folder.path,
            needed=needed,
        )

    def _try_hold(self, wanted: Sequence[FileEntry], evict: Evict = "any") -> FileHold | NoRoom:
        """Hold the files, or none of them if there is no room for all missing ones."""
        hits = len(wanted)
        with errors_as_no_space(self.folder.path), ExitStack() as failed:
            held = failed.enter_context(FileHold())
            while missing := self._hold_cached(held, wanted):
                reserved = self.folder.reserve_room(missing, self.limit_bytes, evict=evict)
                if isinstance(reserved, NoRoom):
                    return reserved
                held.has_downloaded = True
                if reserved.own:
                    self._download(reserved.own, held)
                    hits -= len(reserved.own)
                self._await_downloads(held, reserved.coming)
            failed.pop_all()
        self._hits += hits
        return held

    def _download(self, files: Sequence[ArrivingFile], held: FileHold) -> None:
        """Download files and hold them; if one fails, give up all."""
        try:
            started = self._start(lambda remote: self._download_all(remote, files))
        except BaseException:
            for file in files:
                file.give_up()
            raise
        self._wait_for(*started)
        for file in files:
            held.add(file.entry, file.lock)

    def _start(
        self, work: Callable[[RemoteFolder], Coroutine[Any, Any, None]]
    ) -> tuple[LoopThread, Future[None]]:
        """Begin to read from the place. Raises UsageError for a closed cache, and in a forked process."""
        if not self.was_made_here:
            raise UsageError(
                "cannot download in a process that was forked from the one that opened it; start it with "
                "multiprocessing's 'spawn'",
                path=self.folder.path,
            )
        with self._lock:  # closing cancels earlier downloads
            self._refuse_closed()
            self._remote = self._remote or RemoteFolder(self.place, self._policy)
            self._loop = self._loop or LoopThread(AT_ONCE).__enter__()
            return self._loop, self._loop.begin(work(self._remote))

    def _wait_for(self, loop: LoopThread, future: Future[None]) -> None:
        try:
            loop.result(future)
        except RemoteDenied:
            self._remote = None  # the next download reads the credentials again, which may be renewed
            raise
        except CancelledError:
            self._refuse_closed()
            raise

    async def _download_all(self, remote: RemoteFolder, files: Sequence[ArrivingFile]) -> None:
        async def download(file: ArrivingFile) -> None:
            await fill(remote, file.entry, file, self._count_received)
            await call_in_thread(file.finish)

        async def show_alive() -> None:  # even if the server is silent
            while True:
                await asyncio.sleep(ALIVE_S)
                for file in files:
                    file.touch()

        alive = asyncio.create_task(show_alive())
        try:
            await run_all([partial(download, file) for file in files], AT_ONCE)
        except BaseException:  # here, where no thread uses the files any more
            for file in files:
                file.give_up()
            raise
        finally:
            alive.cancel()
        self._files += len(files)  # only the loop's thread counts these
        self._bytes += sum(file.entry.size for file in files)

    def _count_received(self, size: int) -> None:
        self._received_bytes += size

    def _hold_cached(self, held: FileHold, entries: Iterable[FileEntry]) -> list[FileEntry]:
        """Hold the files that are in the cache, and return the others."""
        for entry in held.missing(entries):
            if (pin := self.folder.pin(entry)) is not None:
                held.add(entry, pin)
        return held.missing(entries)

    def _await_downloads(self, held: FileHold, coming: Sequence[FileEntry]) -> None:
        """Wait for the files that other processes download, and hold them."""
        patience = Patience(self._patience_s, "a file that another process downloads into the cache")
        while times := {
            file: at for file in self._hold_cached(held, coming) if (at := self.folder.download_seen_ns(file))
        }:
            self._refuse_closed()
            patience.wait(self.folder.part_of(next(iter(times))), times)


@dataclass(frozen=True)
class FileSource:
    """The origin of a dataset's files: the local disk, or a ``place`` with a cache of ``limit`` bytes."""

    place: Location | None = None
    cache: Path | None = None
    limit: int | None = None

    @classmethod
    def of(cls, dataset: RecordSet) -> FileSource:
        return getattr(dataset, "source", cls())  # a CachedDataset has one

    @contextmanager
    def open(self, shared: FileCache | None = None, *, held: bool = False) -> Iterator[LocalFiles]:
        """Make the files available during the context, in the ``shared`` cache or one that is opened."""
        if self.place is None:
            yield LOCAL
            return
        with HeldFiles(self.open_cache, shared, most=0 if held else 1) as files:
            yield files

    def open_cache(self) -> FileCache:
        if self.place is None or self.cache is None:
            raise ValueError("the files are local")
        return FileCache(self.cache, self.limit, self.place)


MAX_HELD = 4  # other files stay open but can be evicted, so an idle reader takes little room


class HeldFiles(LocalFiles, Owner, Closable):
    """Holds the last files that were opened, at most ``most``, or fewer if there is no room.

    The cache is ``shared``, or opened when it is needed, and closed at the end. If ``most`` is 0, another
    process holds the files, and damaged ones are replaced. Thread-safe; a forked process starts with none.
    """

    def __init__(
        self, opened: Callable[[], FileCache], shared: FileCache | None = None, *, most: int = MAX_HELD
    ) -> None:
        self._open, self._shared, self._most = opened, shared, most
        self._cache: FileCache | None = None
        self._lock = threading.Lock()  # for opening the cache
        self._process = os.getpid()
        self._held: OrderedDict[str, FileHold] = OrderedDict()  # changed by single calls, without a lock

    @property
    def cache(self) -> FileCache:
        if (cache := self._shared or self._cache) is not None:  # a forked copy might never get the lock
            return cache
        with self._lock:
            self._cache = self._cache or self._open()
            return self._cache

    def provide(self, entry: FileEntry) -> None:
        """Make a file available and hold it. Raises the errors of :meth:`FileCache.hold`."""
        if not self._most:
            return
        if self._process != os.getpid():
            self._process, self._held = os.getpid(), OrderedDict()
        held = self._held.pop(hex_of(entry), None)
        if held is None:
            if len(self._held) >= self._most:
                self._release_first()
            held = self.cache.hold([entry], self._release_first)
        if replaced := self._held.pop(hex_of(entry), None):
            replaced.release()
        self._held[hex_of(entry)] = held
        if len(self._held) > self._most:
            self._release_first()

    @contextmanager
    def replace(self, entry: FileEntry, error: Exception) -> Iterator[None]:
        self._release_all()  # otherwise the replaced copy would be held
        with self.cache.hold_intact(entry, self._release_first), explain_damage(self.cache, entry):
            yield

    def _release_first(self) -> bool:
        """Release the file that was opened first; return False if there was none."""
        try:
            self._held.popitem(last=False)[1].release()
        except KeyError:
            return False
        return True

    def _release_all(self) -> None:
        while self._release_first():
            pass

    def close(self) -> None:
        """Release the files, and close the cache; the next use opens it again. Idempotent."""
        cache, self._cache = self._cache, None
        self._release_all()
        if cache is not None:
            cache.close()


@contextmanager
def explain_damage(cache: FileCache, entry: FileEntry) -> Iterator[None]:
    """Explain that damage in a file with the right SHA-256 was published, rather than caused by a disk."""
    try:
        yield
    except (CorruptRecord, ShardDamaged, ManifestDamaged) as error:
        what = error.message.partition(";")[0]
        raise type(error)(
            f"{what}, although the file matches the manifest: it was published that way, or a table is "
            f"damaged here; run prep verify {cache.place.url} --cache {cache.folder.path} to replace it",
            path=cache.place.url,
            shard=entry.name,
            key=error.key,
        ) from error


class CachedDataset(Dataset):
    """The dataset at the place of a ``source``, read through its cache; see :func:`open_dataset`.

    ``path`` is its folder in the cache, where shards come and go. With a ``root``, only that dataset is
    opened, and without network access if this cache knows it. Picklable (as its source and root).
    :meth:`close` also stops the download thread; the next read restarts it.
    """

    def __init__(self, source: FileSource, *, labels: str = "sorted_wnid0", root: str | None = None) -> None:
        self.source = source
        self._files = self._held = HeldFiles(self._open_cache)
        try:
            folder, self._place = self.cache.folder, self.cache.place
            manifest = self._read_manifest(folder, root)
            self.cache.keep(self.cache.hold(tables_of(manifest)))
            for table in manifest.tables:
                if table.name != INDEX_NAME:  # checked when it is read on opening
                    self.cache.keep(self.cache.hold_intact(table))
            self._open(folder.dataset(manifest.root), labels, manifest)
        except BaseException:
            self._held.close()
            raise

    def _open(self, folder: Path, labels: str, manifest: Manifest) -> None:
        try:
            super().__init__(folder, labels=labels)
        except (ManifestDamaged, OSError):
            if (index := manifest.table(INDEX_NAME)) is None:
                raise
            self.cache.keep(self.cache.hold_intact(index))
            with explain_damage(self.cache, index):
                super().__init__(folder, labels=labels)

    @property
    def cache(self) -> FileCache:
        """The cache of this dataset's files, which keeps the tables while the dataset is open."""
        return self._held.cache

    def _open_cache(self) -> FileCache:
        cache = self.source.open_cache()
        if hasattr(self, "manifest"):  # the folder may have been deleted since the dataset was closed
            cache.folder.publish(self.manifest)
        return cache

    def _read_manifest(self, folder: CacheFolder, root: str | None) -> Manifest:
        """Return the manifest with that root if the cache knows it, else the one at the place."""
        if root and (manifest := folder.manifest(root)) is not None:
            return manifest
        remote = remote_dataset(self._place)
        if root not in (None, remote.manifest.root):
            raise SourceDamaged("was replaced by another dataset; open it again", path=self._place.url)
        folder.publish(remote.manifest)
        return remote.manifest

    @property
    def location(self) -> str:
        return self._place.url

    def _name_at(self, path: Path) -> str:
        return self._place.name

    def close(self) -> None:
        """Close the shards, release their files, and stop downloads. No other thread may be reading."""
        super().close()
        self._held.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CachedDataset, labels=self.label_space, root=self.manifest.root), (self.source,)
