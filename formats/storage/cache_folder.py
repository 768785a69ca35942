"""The folder of a cache on disk: its files, locks and readers, and the order of eviction.

``files/ab/<SHA-256>`` are whole, verified files; ``parts/`` has unfinished downloads, ``readers/`` the
announcements of living readers, and ``datasets/<root>/`` folders of links that look like a dataset. The
folder changes only under the lock of the whole cache, and a file in use has a shared lock. ``replaced`` has a
line with the SHA-256 of each copy that was discarded because the disk had corrupted it.

Each reader announces its limit and the files that it will use, in order. Its file is locked while it lives;
a file without a lock is a leftover, and is removed. The file has a header of little-endian uint64 (a mark,
the limit in bytes, the number of uses done), and then a uint64 for each use: the first 8 bytes of the file's
SHA-256, as a big-endian number. Announcements only determine what is evicted.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ManifestDamaged, OperationError, UsageError
from shardprep.formats.runtime.files import (
    FULL_DISK,
    NETWORK_FILESYSTEMS,
    OPEN_FLAGS,
    disk_room,
    errors_as_no_space,
    filesystem_type,
    name_in_os_errors,
    publish_bytes,
    read_at,
    temporary_path,
    write_at,
)
from shardprep.formats.runtime.owners import Descriptor, LockDescriptor, Owner
from shardprep.formats.runtime.work_folder import CACHE_LOCK_NAME
from shardprep.formats.shards.dataset import refuse_in_dataset
from shardprep.formats.shards.manifest import Manifest, read_manifest
from shardprep.formats.shards.read import MANIFEST_NAME, FileEntry
from shardprep.formats.storage.transfer import PART_FLAGS, HashedFile


def hex_of(entry: FileEntry) -> str:
    """Return a file's SHA-256 in hexadecimal: its name in a cache."""
    return entry.sha256.removeprefix("sha256:")


def identity_of(name: str) -> int:
    """Return the number of a file in readers' announcements: the first 8 bytes of its SHA-256.

    >>> identity_of("00000000000000ff" + 48 * "0")
    255
    """
    return int(name[:16], 16)


class CachedFile(NamedTuple):
    """A whole file in a cache: its SHA-256 as ``name``, and its size in bytes."""

    name: str
    path: str  # thousands are listed, and a Path takes half of that time
    size: int


def eviction_order(
    files: Iterable[CachedFile], distances: Mapping[int, float], *, beyond: float = -1.0
) -> list[CachedFile]:
    """Return the files that are used again ``beyond`` a number of uses, in the order of eviction.

    ``distances`` are the numbers of uses before each file is used again, by :func:`identity_of`. Files
    without one come first, least recently used first; then the others, largest distance first.
    """
    keys = []
    for file in files:
        distance = distances.get(identity_of(file.name), math.inf)
        if distance > beyond:
            used_ns = os.lstat(file.path).st_mtime_ns if distance == math.inf else 0
            keys.append((-distance, used_ns, file))
    return [file for *_, file in sorted(keys)]


SHORTEST_S, LONGEST_S = 0.005, 0.1
PATIENCE_S = 300.0  # for other readers, which may pause while their training does something else
MAX_COUNTED_S = 1.0  # of a pause: this process may have been stopped meanwhile, as by Ctrl-Z


class CacheBusy(OperationError):
    """Another process holds a cache's lock, or downloads a file into it, and makes no progress."""


class StillWaiting(UserWarning):
    """A reader of a cache has waited for a tenth of its patience."""


class Patience:
    """Increasing pauses, and the time since the awaited state last changed.

    Warns once after a tenth of ``most_s`` seconds without a change; ``what`` names the awaited event.
    """

    def __init__(self, most_s: float, what: str) -> None:
        self.most_s, self._what = most_s, what
        self._next_s, self._has_warned = SHORTEST_S, False
        self._state: object = None
        self._last, self._idle_s = time.monotonic(), 0.0

    def pause(self, state: object = None) -> float:
        """Pause; return the seconds since the awaited state last changed."""
        time.sleep(self._next_s)
        self._next_s = min(LONGEST_S, 2 * self._next_s)
        before, self._last = self._last, time.monotonic()
        self._idle_s += min(MAX_COUNTED_S, self._last - before)
        if state != self._state:
            self._state, self._idle_s = state, 0.0
        if self._idle_s >= self.most_s / 10 and not self._has_warned:
            self._has_warned = True
            waited = f"has waited {self._idle_s:.0f} s (of at most {self.most_s:g} s) for {self._what}"
            warnings.warn(waited, StillWaiting, stacklevel=2)
        return self._idle_s

    def wait(self, path: Path, state: object = None) -> None:
        """Pause; raise CacheBusy, for this file, if the state has not changed for ``most_s`` seconds."""
        if self.pause(state) >= self.most_s:
            raise CacheBusy(
                f"no change for {self.most_s:g} s while waiting for {self._what}; lslocks names the process "
                "that has locked the file: let it continue, or end it",
                path=path,
            )


FOLDERS = ("files", "parts", "readers", "datasets")
SECOND_NS, TICK_NS = 10**9, 10**8

_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)
_READER = re.compile(r"[0-9]+-[0-9a-f]{16}(\.tmp)?", re.ASCII)


class CacheFolder:
    """The files of a cache, and its lock. Deletes only files that a cache has made.

    Methods that take a lock raise CacheBusy if others keep it for ``patience_s`` seconds.
    """

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        self.path = path
        self._patience_s = patience_s
        self.files, self.parts, self.readers, self.datasets = (path / name for name in FOLDERS)
        self._listed = dict[str, tuple[int, list[CachedFile]]]()

    def make(self) -> None:
        """Make the folder unless it exists. Raises UsageError for a folder that is not a cache; OSError."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError("is not a folder; choose another cache", path=self.path)
        if (kind := filesystem_type(self.path)) in NETWORK_FILESYSTEMS:
            raise UsageError(f"is on a network file system ({kind}); choose a local disk", path=self.path)
        refuse_in_dataset(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        # In this order: another process may be making the cache, its lock first.
        if any(self.path.iterdir()) and not (self.path / CACHE_LOCK_NAME).exists():
            raise UsageError("is not empty and is not a cache; choose a new folder", path=self.path)
        with self.critical_section():
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)

    @contextmanager
    def critical_section(self) -> Iterator[None]:
        """Hold the cache's lock, against all processes and threads. Not reentrant.

        Raises OperationError if the folder, or a part of it, was deleted; NoSpace for a full disk.
        """
        path = self.path / CACHE_LOCK_NAME
        try:
            try:
                lock = LockDescriptor(os.open(path, PART_FLAGS, 0o666))
            except PermissionError as error:
                advice = "choose another cache, or share it: a group for all users, chmod g+ws, and umask 002"
                raise OperationError(f"is not writable for this user; {advice}", path=path) from error
            with closing(lock), errors_as_no_space(self.path):
                patience = Patience(self._patience_s, f"the lock on {path}, which another process holds")
                while not lock.lock(wait=False):
                    patience.wait(path)
                for folder in (self.files, self.parts, self.readers, self.datasets):
                    _refuse_link(folder)
                yield
        except FileNotFoundError as error:
            raise OperationError("was deleted while it was in use; start again", path=self.path) from error

    def path_of(self, entry: FileEntry) -> Path:
        """Return the path of a whole file."""
        name = hex_of(entry)
        return self.files / name[:2] / name

    def _size_of(self, entry: FileEntry) -> int | None:
        with suppress(FileNotFoundError):
            return self.path_of(entry).lstat().st_size
        return None

    def part_of(self, entry: FileEntry) -> Path:
        """Return the path of a file while it is downloaded."""
        return self.parts / f"{hex_of(entry)}.part"

    def dataset(self, root: str) -> Path:
        """Return the folder of links that look like the dataset with this root."""
        return self.datasets / root.removeprefix("sha256:")

    def manifest(self, root: str) -> Manifest | None:
        """Return the manifest of a dataset that was opened before, or None. Raises OSError."""
        with suppress(FileNotFoundError, ManifestDamaged):
            if (manifest := read_manifest(self.dataset(root))).root == root:
                return manifest
        return None

    def publish(self, manifest: Manifest) -> None:
        """Make a dataset's folder unless it exists; the manifest comes last. Raises OSError."""
        folder = self.dataset(manifest.root)
        with self.critical_section():
            if self.manifest(manifest.root) is not None:
                return
            _refuse_link(folder)
            folder.mkdir(exist_ok=True)
            for entry in manifest.files:
                link = temporary_path(folder, entry.name)
                link.symlink_to(os.path.relpath(self.path_of(entry), folder))  # a cache can be moved
                link.replace(folder / entry.name)
            publish_bytes(folder / MANIFEST_NAME, manifest.to_bytes(), folder)

    def pin(self, entry: FileEntry) -> LockDescriptor | None:
        """Return a lock that prevents a file's eviction, or None if the whole file is not there."""
        try:
            lock = _open_lock(self.path_of(entry))
        except FileNotFoundError:
            return None
        lock.lock(shared=True)
        if not is_whole(lock, entry):
            lock.close()
            return None
        with suppress(OSError):  # another user's file, or no room for the change
            os.utime(lock.fileno())
        return lock

    def discard(self, entry: FileEntry, pin: LockDescriptor) -> None:
        """Discard the corrupt file with this pin, unless another process already has."""
        with self.critical_section():
            if not is_whole(pin, entry):
                return
            remove_file(self.path_of(entry), pin)
            flags = PART_FLAGS | os.O_APPEND | os.O_NONBLOCK
            with suppress(OSError), os.fdopen(os.open(self.path / "replaced", flags, 0o666), "wb") as log:
                log.write(f"{hex_of(entry)}\n".encode())

    @property
    def replaced(self) -> int:
        """The number of files that were discarded as corrupt."""
        with suppress(OSError):
            return (self.path / "replaced").stat().st_size // 65
        return 0

    def download_seen_ns(self, entry: FileEntry) -> int | None:
        """Return when a file's download was last seen alive, in ns; None if no process downloads it."""
        with suppress(FileNotFoundError), closing(_open_lock(self.part_of(entry))) as lock:
            if not lock.lock(wait=False):
                return os.fstat(lock.fileno()).st_mtime_ns
        return None

    def cached_files(self) -> list[CachedFile]:
        """Return the whole files. The caller holds the lock.

        A folder is listed again if it has changed since, or so shortly before that its time would not show
        another change; on a disk with times in seconds, always.
        """
        before, self._listed = self._listed, {}
        for folder in [*os.scandir(self.files)]:
            if folder.is_dir(follow_symlinks=False):
                changed_ns = folder.stat(follow_symlinks=False).st_mtime_ns
                known_ns, files = before.get(folder.name, (-1, []))
                if changed_ns != known_ns:
                    is_settled = changed_ns % SECOND_NS and time.time_ns() - changed_ns > TICK_NS
                    files, known_ns = [*_files_in(folder)], changed_ns if is_settled else -1
                self._listed[folder.name] = known_ns, files
        return [file for _, files in self._listed.values() for file in files]

    def remove_leftovers(self) -> int:
        """Remove dead processes' downloads; return the bytes of the others. The caller holds the lock."""
        parts = [path for path in self.parts.glob("*.part") if _NAME.fullmatch(path.stem)]
        return sum(os.fstat(lock.fileno()).st_size for lock in _locked_files(parts))

    @property
    def room_bytes(self) -> int:
        """The bytes that the cached files take, and those that are free on the disk."""
        with self.critical_section():
            cached = sum(file.size for file in self.cached_files()) + self.remove_leftovers()
            return max(0, cached + disk_room(self.path)[1] - SPARE_BYTES)

    def reserve_room(
        self, entries: Sequence[FileEntry], limit: int, *, evict: Evict = "any"
    ) -> Arrivals | NoRoom:
        """Reserve room for all files that are neither there nor being downloaded, or for none.

        The smallest of ``limit`` and the limits of all living readers applies. Pinned files stay; ``evict``
        says which others may go: any, those used later than the one entry, or none. Raises OSError.
        """
        with self.critical_section(), ExitStack() as failed:
            arriving, files = self.remove_leftovers(), self.cached_files()
            readers, (size, free) = living_readers(self.readers), disk_room(self.path)
            limit = min([limit, size, *(reader.limit for reader in readers)])
            state = {file.name for file in files}, arriving, [reader.position for reader in readers]
            arrivals = Arrivals([], [])

            def evict_for(lacking: int) -> int:
                if lacking <= 0 or evict == "none":
                    return 0
                distances, keep = next_use_distances(readers), {hex_of(entry) for entry in entries}
                others = [file for file in self.cached_files() if file.name not in keep]
                first = distances.get(identity_of(hex_of(entries[0])), math.inf) if evict == "later" else -1.0
                return _evict(eviction_order(others, distances, beyond=first), lacking)

            try:
                for entry in entries:
                    with suppress(FileExistsError):
                        if self._size_of(entry) != entry.size:
                            arrivals.own.append(ArrivingFile(self, entry))
                            failed.callback(arrivals.own[-1].give_up)
                            continue
                    arrivals.coming.append(entry)  # or it came since the caller looked
                wanted = sum(file.entry.size for file in arrivals.own)
                used = arriving + sum(file.size for file in files)
                lacking_on_disk = wanted + SPARE_BYTES - free if wanted else 0
                lacking = max(used + wanted - limit, lacking_on_disk)
                if (freed := evict_for(lacking)) < lacking:
                    least = used + wanted - freed
                    is_full = freed < lacking_on_disk and least <= limit
                    return NoRoom(least, limit, errno.ENOSPC if is_full else None, state)
                for file in arrivals.own:
                    file.reserve()
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                evict_for(sum(entry.size for entry in entries))  # a quota does not show in the disk's usage
                return NoRoom(0, limit, error.errno, state)
            failed.pop_all()
            return arrivals


Evict = Literal["any", "later", "none"]

SPARE_BYTES = 1 << 20  # of the disk, for readers' files and links


class Arrivals(NamedTuple):
    """Missing files: ``own`` have room reserved, to be downloaded here; others download ``coming``."""

    own: list[ArrivingFile]
    coming: list[FileEntry]


class NoRoom(NamedTuple):
    """The cache has no room now: the ``least`` sufficient limit, and the ``state`` of the cache.

    ``full`` is the system's error, one of FULL_DISK, if other files fill the disk or the quota. ``state``
    changes as soon as any reader makes progress.
    """

    least: int
    limit: int
    full: int | None
    state: tuple[object, ...]


def _evict(files: Sequence[CachedFile], lacking: int) -> int:
    """Remove unused files, in order, until ``lacking`` bytes are free; none if all are not enough.

    Return the bytes that were, or could have been, removed.
    """
    free, freed = [], 0
    for file in files:
        if freed >= lacking:
            break
        if _is_unused(file):
            free.append(file)
            freed += file.size
    if freed >= lacking:
        freed = sum(file.size for file in free if _is_unused(file, remove=True))
    return freed


def _is_unused(file: CachedFile, *, remove: bool = False) -> bool:
    """Whether no reader has a lock on the file; with ``remove``, remove it then."""
    with closing(_open_lock(file.path)) as lock:
        is_unused = lock.lock(wait=False)
        if is_unused and remove:
            remove_file(Path(file.path), lock)
        return is_unused


def remove_file(path: Path, file: LockDescriptor) -> None:
    """Remove a file and truncate it, or a reader that has it open would keep its bytes on the disk.

    The records of such a reader then fail their check. A file with other names, or of another user, is not
    truncated.
    """
    writable: Descriptor | None = None
    if os.fstat(file.fileno()).st_nlink == 1:
        with suppress(PermissionError):
            os.fchmod(file.fileno(), 0o600)
            writable = Descriptor(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    path.unlink()  # first: as long as the name exists, the file is whole
    if writable is not None:
        with closing(writable):
            os.ftruncate(writable.fileno(), 0)


def is_whole(lock: LockDescriptor, entry: FileEntry) -> bool:
    """Whether an open file still has a name, and the size in the manifest."""
    status = os.fstat(lock.fileno())
    return status.st_nlink > 0 and status.st_size == entry.size


def _refuse_link(folder: Path) -> None:
    """Raise OperationError for a link, since files elsewhere would be changed or removed."""
    if folder.is_symlink():
        raise OperationError("is a link where a folder belongs; remove it", path=folder)


def _files_in(folder: os.DirEntry[str]) -> Iterator[CachedFile]:
    for each in [*os.scandir(folder)]:  # which closes the folder, whatever is raised below
        if _NAME.fullmatch(each.name) and each.is_file(follow_symlinks=False):
            yield CachedFile(each.name, each.path, each.stat(follow_symlinks=False).st_size)


def _locked_files(paths: Iterable[Path]) -> Iterator[LockDescriptor]:
    """Yield the files that living processes have locked, and remove those of dead ones."""
    for path in paths:
        with suppress(FileNotFoundError, PermissionError), closing(_open_lock(path)) as lock:
            if lock.lock(wait=False):
                path.unlink(missing_ok=True)
            else:
                yield lock


def _open_lock(path: str | Path) -> LockDescriptor:
    return LockDescriptor(os.open(path, OPEN_FLAGS | os.O_NOFOLLOW))


MARK = 0x31_52_44_52_50_52_48_53  # "SHRPRDR1"
HEADER = 3  # numbers before the uses
POSITION_AT = 16
MAX_BYTES = 1 << 28

Uses = npt.NDArray[np.uint64]


class LivingReader(NamedTuple):
    """The announced uses of one reader, ``position`` of which are done."""

    limit: int
    position: int
    uses: Uses


class ReaderFile(Owner):
    """The file of this reader. The caller holds the cache's lock to make or change it."""

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        self._path = folder / name
        self._limit = limit
        self._lock = self._write(np.zeros(0, np.uint64))

    def _write(self, uses: Uses) -> LockDescriptor:
        new = self._path.with_suffix(".tmp")
        new.unlink(missing_ok=True)
        lock = LockDescriptor(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        lock.lock()
        header = np.array([MARK, self._limit, 0], np.uint64)
        write_at(lock.fileno(), np.concatenate([header, uses]).astype("<u8").tobytes(), 0)
        new.replace(self._path)
        return lock

    def announce(self, uses: Uses) -> None:
        """Replace the announced uses."""
        with suppress(OSError):  # such as a full disk: announcements only order evictions
            before, self._lock = self._lock, self._write(uses)
            before.close()

    def record_position(self, position: int) -> None:
        """Record how many announced uses are done. Needs no lock."""
        with suppress(OSError):
            os.pwrite(self._lock.fileno(), position.to_bytes(8, "little"), POSITION_AT)

    def remove(self) -> None:
        """Unregister this reader."""
        self._path.unlink(missing_ok=True)
        self._lock.close()


def living_readers(folder: Path) -> list[LivingReader]:
    """Return the living readers, and remove the files of dead ones. The caller holds the cache's lock."""
    readers = []
    for lock in _locked_files(sorted(path for path in folder.iterdir() if _READER.fullmatch(path.name))):
        data = read_at(lock.fileno(), min(MAX_BYTES, os.fstat(lock.fileno()).st_size), 0)
        numbers = np.frombuffer(data, "<u8", len(data) // 8)
        if len(numbers) >= HEADER and numbers[0] == MARK:
            readers.append(LivingReader(int(numbers[1]), int(numbers[2]), numbers[HEADER:]))
    return readers


def next_use_distances(readers: Iterable[LivingReader]) -> dict[int, float]:
    """Return the number of uses before each file is used again, by the reader that uses it first."""
    distances: dict[int, float] = {}
    for reader in readers:
        uses, firsts = np.unique(reader.uses[reader.position :], return_index=True)
        for identity, distance in zip(uses.tolist(), firsts.tolist(), strict=True):
            distances[identity] = min(distances.get(identity, distance), distance)
    return distances


class ArrivingFile(HashedFile):
    """A file being downloaded, with its ``lock``. The cache's lock is held to make or publish it.

    Raises FileExistsError if it is already being downloaded.
    """

    def __init__(self, folder: CacheFolder, entry: FileEntry) -> None:
        super().__init__(folder.part_of(entry))
        self.entry = entry
        self._folder, self._is_published = folder, False
        if not self.lock.lock(wait=False) or not os.fstat(self.lock.fileno()).st_nlink:  # just given up
            self.close()
            raise FileExistsError(self.path)

    def reserve(self) -> None:
        """Allocate the file's size. Raises OSError."""
        with name_in_os_errors(self.path):
            if self.entry.size:
                os.posix_fallocate(self.lock.fileno(), 0, self.entry.size)
            os.ftruncate(self.lock.fileno(), self.entry.size)
        self.room = self.entry.size

    def touch(self) -> None:
        """Show processes that wait for the file that this one is alive."""
        with suppress(OSError):
            os.utime(self.lock.fileno())

    def finish(self) -> None:
        """Publish the complete file, and share its lock with readers."""
        with name_in_os_errors(self.path):
            os.fsync(self.lock.fileno())  # before the cache's lock: it can take long
        final = self._folder.path_of(self.entry)
        final.parent.mkdir(exist_ok=True)
        with self._folder.critical_section():
            self.publish(final)
            self.lock.lock(shared=True)
            self._is_published = True

    def give_up(self) -> None:
        """Close the file, and remove it unless it was published."""
        if not self._is_published:
            self.path.unlink(missing_ok=True)
        self.close()
