"""The folder of a cache on disk.

``files/ab/<SHA-256>`` are whole, verified files, ``parts/`` those that are on their way, ``readers/`` what
the living readers have told, and ``datasets/<root>/`` folders of links that look like a dataset. What is
there changes only under the lock of the whole cache, and a file that is read has a shared lock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.errors import UsageError
from shardprep.formats.system.descriptor import LockDescriptor
from shardprep.formats.system.filesystem import NETWORK_FILESYSTEMS, filesystem_type
from shardprep.formats.system.regular_file import OPEN_FLAGS

from .eviction import CachedFile, hex_of

LOCK_NAME = "shardprep-cache.lock"  # also what shows that a folder is a cache
FOLDERS = ("files", "parts", "readers", "datasets")

_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)


class CacheFolder:
    """The paths of a cache, and its lock. Deletes nothing but what a cache has made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files, self.parts, self.readers, self.datasets = (path / name for name in FOLDERS)

    def make(self) -> None:
        """Make the folder unless it is there. Raises UsageError for one that is no cache, OSError."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError("is not a folder; choose another cache", path=self.path)
        if (kind := filesystem_type(self.path)) in NETWORK_FILESYSTEMS:
            raise UsageError(f"is on a network file system ({kind}); choose a local disk", path=self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        # In this order: another process may make the cache meanwhile, its lock first.
        if any(self.path.iterdir()) and not (self.path / LOCK_NAME).exists():
            raise UsageError("is not empty, and no cache; choose a new folder", path=self.path)
        with self.turn():
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only one, of all processes and threads, that changes the cache. Not reentrant."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = LockDescriptor(os.open(self.path / LOCK_NAME, flags, 0o644))
        try:
            lock.lock()
            yield
        finally:
            lock.close()

    @contextmanager
    def last_turn(self) -> Iterator[None]:
        """Be the only one that ends something, as in :meth:`turn`, but also where the folder is gone."""
        with ExitStack() as turn:
            with suppress(FileNotFoundError):
                turn.enter_context(self.turn())
            yield

    def path_of(self, name: str) -> Path:
        """Return the path of the whole file with that SHA-256."""
        return self.files / name[:2] / name

    def part_of(self, name: str) -> Path:
        """Return the path of that file while it is on its way."""
        return self.parts / f"{name}.part"

    def pinned(self, entry: FileEntry) -> LockDescriptor | None:
        """Return a lock that keeps a file from being evicted, None if it is not there whole."""
        try:
            lock = LockDescriptor(os.open(self.path_of(hex_of(entry)), OPEN_FLAGS | os.O_NOFOLLOW))
        except FileNotFoundError:
            return None
        lock.lock(shared=True)
        if is_there(lock, entry):
            with suppress(PermissionError):  # of another user
                os.utime(lock.fileno())
            return lock
        lock.close()
        return None

    def is_coming(self, entry: FileEntry) -> bool:
        """Whether a process downloads the file now."""
        try:
            lock = LockDescriptor(os.open(self.part_of(hex_of(entry)), OPEN_FLAGS | os.O_NOFOLLOW))
        except FileNotFoundError:
            return False
        try:
            return not lock.lock(wait=False)
        finally:
            lock.close()

    def cached(self) -> list[CachedFile]:
        """Return the whole files. The caller has its turn."""
        return [file for folder in _listed(self.files) if folder.is_dir() for file in _files_in(folder)]

    def remove_leftovers(self) -> int:
        """Remove what dead processes left of files on their way; return the bytes of those that come.

        The caller has its turn.
        """
        return sum(_bytes_coming(Path(each)) for each in _listed(self.parts))


def is_there(lock: LockDescriptor, entry: FileEntry) -> bool:
    """Whether an open file still has a name, and the size that the manifest lists."""
    status = os.fstat(lock.fileno())
    return status.st_nlink > 0 and status.st_size == entry.size


def _listed(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return [*found]


def _files_in(folder: os.DirEntry[str]) -> Iterator[CachedFile]:
    for each in _listed(folder):
        if _NAME.fullmatch(each.name) and each.is_file(follow_symlinks=False):
            status = each.stat(follow_symlinks=False)
            yield CachedFile(each.name, Path(each.path), status.st_size, status.st_mtime_ns)


def _bytes_coming(path: Path) -> int:
    if path.suffix != ".part" or not _NAME.fullmatch(path.stem):
        return 0
    lock = LockDescriptor(os.open(path, OPEN_FLAGS | os.O_NOFOLLOW))
    try:
        if lock.lock(wait=False):
            path.unlink()
            return 0
        return os.fstat(lock.fileno()).st_size
    finally:
        lock.close()
