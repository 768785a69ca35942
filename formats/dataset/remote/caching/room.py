"""Room for files in a cache: taken for all at once, from files that are not needed sooner."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.errors import NoSpace
from shardprep.formats.system.descriptor import LockDescriptor
from shardprep.formats.system.full_disk import no_space
from shardprep.formats.system.regular_file import OPEN_FLAGS

from .cache_folder import CacheFolder
from .eviction import CachedFile, eviction_order, hex_of, identity_of
from .reader_file import living_readers, nearest
from .reserved_part import ReservedPart


class CacheTooSmall(NoSpace):
    """A cache's limit is less than what is to be read at once; ``needed`` is the least that would do."""

    def __init__(self, message: str, *, path: os.PathLike[str], needed: int) -> None:
        super().__init__(message, path=path)
        self.needed = needed


Evict = Literal["any", "later", "none"]


@dataclass
class Taken:
    """What became of missing files: ``parts`` with their room, and those that are ``coming`` by others."""

    parts: list[ReservedPart] = field(default_factory=list)
    coming: list[FileEntry] = field(default_factory=list)

    def give_up(self) -> None:
        """Remove the parts. The caller has its turn."""
        while self.parts:
            self.parts.pop().remove()


@dataclass(frozen=True)
class NoRoom:
    """That there was no room: the ``least`` limit that would have done now, and how the cache was.

    ``is_full`` says that the disk is, by what is not the cache's. ``state`` is another one as soon as any
    reader has moved on.
    """

    least: int
    limit: int
    is_full: bool
    state: tuple[object, ...]


def take_room(
    folder: CacheFolder, entries: Sequence[FileEntry], limit: int, *, evict: Evict = "any"
) -> Taken | NoRoom:
    """Take the room of all the files that are neither there nor on their way, or of none.

    ``limit`` is that of the caller; of those of all living readers the smallest holds. Files that are pinned
    stay; ``evict`` says which others go: any, those that are used later than the one entry, or none. Raises
    NoSpace, OSError.
    """
    taken = Taken()
    with folder.turn():
        account = _Account(folder, limit)
        try:
            account.begin(taken, entries)
            if (missing := account.make_room(taken, entries, evict)) is None:
                for part in taken.parts:
                    _reserve(part)
                return taken
        except BaseException:
            taken.give_up()
            raise
        taken.give_up()
        return missing


def room_on_disk(folder: CacheFolder) -> int:
    """Return the bytes that the files of a cache have, with what is free on its disk."""
    with folder.turn():
        cached = sum(file.size for file in folder.cached()) + folder.remove_leftovers()
        return cached + shutil.disk_usage(folder.path).free


class _Account:
    """What a cache has while no other process changes it."""

    def __init__(self, folder: CacheFolder, limit: int) -> None:
        self._folder = folder
        self._readers = [*living_readers(folder.readers)]
        self._disk = shutil.disk_usage(folder.path)
        self._limit = min([limit, self._disk.total, *(reader.limit for reader in self._readers)])
        self._distances = nearest(self._readers)
        self._coming = folder.remove_leftovers()
        self._files = folder.cached()

    def begin(self, taken: Taken, entries: Iterable[FileEntry]) -> None:
        """Make parts for the files that are neither there nor on their way."""
        there = {file.name: file.size for file in self._files}
        for entry in entries:
            if there.get(hex_of(entry)) == entry.size:
                taken.coming.append(entry)  # since the caller looked
                continue
            try:
                taken.parts.append(ReservedPart(self._folder.part_of(hex_of(entry)), entry))
            except FileExistsError:
                taken.coming.append(entry)

    def make_room(self, taken: Taken, entries: Sequence[FileEntry], evict: Evict) -> NoRoom | None:
        """Evict what has to go for the parts; if that is not enough, evict nothing, and return why."""
        wanted = sum(part.entry.size for part in taken.parts)
        used = self._coming + sum(file.size for file in self._files)
        lacking = max(used + wanted - self._limit, wanted - self._disk.free)
        bound = self._distance(hex_of(entries[0])) if evict == "later" else -1
        keep = {hex_of(entry) for entry in entries}
        others = [f for f in self._files if f.name not in keep and self._distance(f.name) > bound]
        others = [] if evict == "none" else others
        freed = _evict(eviction_order(others, self._distances), lacking)
        if freed >= lacking:
            return None
        is_full = self._disk.free + freed < wanted and used + wanted - freed <= self._limit
        return NoRoom(used + wanted - freed, self._limit, is_full, self._state())

    def _distance(self, name: str) -> float:
        return self._distances.get(identity_of(name), math.inf)

    def _state(self) -> tuple[object, ...]:
        return {file.name for file in self._files}, self._coming, [r.position for r in self._readers]


def _evict(files: Sequence[CachedFile], lacking: int) -> int:
    """Remove the first files on which there is no lock, as many as are needed, or none if all are too few.

    Return the bytes that were, or could have been, removed.
    """
    free = sum(file.size for file in files if _unless_pinned(file, lambda: None)) if lacking > 0 else 0
    if free < lacking:
        return free
    freed = 0
    for file in files:
        if freed >= lacking:
            break
        freed += file.size if _unless_pinned(file, file.path.unlink) else 0
    return freed


def _unless_pinned(file: CachedFile, call: Callable[[], None]) -> bool:
    """Call unless a reader has a lock on the file; return whether none has."""
    lock = LockDescriptor(os.open(file.path, OPEN_FLAGS | os.O_NOFOLLOW))
    try:
        if is_free := lock.lock(wait=False):
            call()
        return is_free
    finally:
        lock.close()


def _reserve(part: ReservedPart) -> None:
    try:
        part.reserve()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_space(part.path) from error
