"""Room for files in a cache: taken for all at once, from files that are not needed sooner."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.errors import NoSpace
from shardprep.formats.system.descriptor import LockDescriptor
from shardprep.formats.system.full_disk import no_space
from shardprep.formats.system.regular_file import OPEN_FLAGS

from .cache_folder import CacheFolder
from .eviction import CachedFile, eviction_order, hex_of, identity_of
from .reader_file import LivingReader, living_readers, nearest
from .reserved_part import ReservedPart


class CacheTooSmall(NoSpace):
    """A cache's limit is less than what is to be read at once; ``needed`` is the least that would do."""

    def __init__(self, message: str, *, path: os.PathLike[str], needed: int) -> None:
        super().__init__(message, path=path)
        self.needed = needed


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

    ``state`` is another one as soon as any reader has moved on.
    """

    least: int
    limit: int
    state: tuple[object, ...]


def take_room(
    folder: CacheFolder,
    entries: Iterable[FileEntry],
    limit: int,
    *,
    sooner: bool = False,
    evict: bool = True,
) -> Taken | NoRoom:
    """Take the room of all the files that are neither there nor on their way, or of none.

    ``limit`` is that of the caller; of those of all living readers the smallest holds. Files that are pinned
    stay; with ``sooner`` also those that are used before the one entry is, and without
    ``evict`` all. Raises NoSpace, OSError.
    """
    taken = Taken()
    with folder.turn():
        try:
            found = _take(folder, taken, [*entries], limit, sooner=sooner, evict=evict)
        except BaseException:
            taken.give_up()
            raise
        if isinstance(found, NoRoom):
            taken.give_up()
        return found


def _take(
    folder: CacheFolder,
    taken: Taken,
    entries: Sequence[FileEntry],
    limit: int,
    *,
    sooner: bool,
    evict: bool,
) -> Taken | NoRoom:
    readers = [*living_readers(folder.readers)]
    limit = min([limit, *(reader.limit for reader in readers)])
    coming = folder.remove_leftovers()
    files = folder.cached()
    there = {file.name: file.size for file in files}
    for entry in entries:
        if there.get(hex_of(entry)) == entry.size:
            taken.coming.append(entry)  # since the caller looked
            continue
        try:
            taken.parts.append(ReservedPart(folder.part_of(hex_of(entry)), entry))
        except FileExistsError:
            taken.coming.append(entry)
    wanted = sum(part.entry.size for part in taken.parts)
    used = coming + sum(file.size for file in files)
    lacking = max(used + wanted - limit, wanted - shutil.disk_usage(folder.path).free)
    distances = nearest(readers)
    bound = distances.get(identity_of(hex_of(entries[0])), math.inf) if sooner else -1
    keep = {hex_of(entry) for entry in entries}
    others = [
        file for file in files if evict and file.name not in keep and _distance(file, distances) > bound
    ]
    if (freed := _evict(eviction_order(others, distances), lacking)) < lacking:
        return NoRoom(used + wanted - freed, limit, _state(files, coming, readers))
    for part in taken.parts:
        _reserve(part)
    return taken


def _distance(file: CachedFile, distances: dict[int, float]) -> float:
    return distances.get(identity_of(file.name), math.inf)


def _state(files: Sequence[CachedFile], coming: int, readers: Iterable[LivingReader]) -> tuple[object, ...]:
    return {file.name for file in files}, coming, [reader.position for reader in readers]


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
