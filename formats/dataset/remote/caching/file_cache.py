"""A cache of the files of one remote dataset, in a folder that all processes of a machine share."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.system.full_disk import no_space
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import PATIENT, RetryPolicy
from shardprep.formats.system.user_path import user_path

from .cache_folder import CacheFolder
from .cached_download import Downloads
from .eviction import hex_of, identity_of
from .held import Held
from .patience import Patience, Pause
from .reader_file import ReaderFile
from .room import CacheTooSmall, Evict, NoRoom, room_on_disk, take_room

PATIENCE_S = 300.0  # for other readers, which may stand still while their training does something else
FULL_DISK_PATIENCE_S = 30.0
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class CacheCounts:
    """What a cache did for this object since it was opened.

    ``downloaded`` files with ``downloaded_bytes`` were downloaded here; ``received_bytes`` also count what is
    on its way, and what had to be asked for again. ``hits`` were there already when they
    were to be held, or came by another process; ``waited_s`` is the time until what was not there was.
    """

    downloaded: int = 0
    downloaded_bytes: int = 0
    received_bytes: int = 0
    hits: int = 0
    waited_s: float = 0.0


class FileCache(Owned, AbstractContextManager["FileCache"]):
    """The files of the dataset at ``place``, each downloaded once for all processes of this machine.

    ``folder`` is a new folder, or a cache, on a local disk. All files in it, of all datasets, have at most
    ``limit_bytes`` together; if living readers gave different limits, the smallest holds. A file is there
    whole and verified, or not at all; whatever dead processes left is removed. Thread-safe. A forked copy
    holds what is there, and cannot download. Close it at the end: it has a thread, and a file that tells
    other processes what this one will use.

    Raises UsageError for a folder that is no cache, or is on a network file system; OSError.
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
        self.folder = CacheFolder(user_path(folder).absolute())
        self.limit_bytes = min(UNLIMITED, UNLIMITED if limit_bytes is None else limit_bytes)
        self.place = place
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._kept, self._hits, self._waited_s = Held(), 0, 0.0
        self._downloads = Downloads(self.folder, place, policy)
        self.folder.make()
        with self.folder.turn():
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            self._reader = ReaderFile(self.folder.readers, name, self.limit_bytes)
        take_room(self.folder, (), self.limit_bytes)  # removes what is left, and what is over the limit

    @property
    def counts(self) -> CacheCounts:
        """What was downloaded, found and waited for so far."""
        arrived = self._downloads
        return CacheCounts(arrived.files, arrived.bytes, arrived.received_bytes, self._hits, self._waited_s)

    @property
    def room_bytes(self) -> int:
        """The bytes that all its files could have now: the limit, or what the disk has."""
        return min(self.limit_bytes, room_on_disk(self.folder))

    def check_fits(self, entries: Iterable[FileEntry]) -> None:
        """Raise CacheTooSmall if one of these files can never be in the cache."""
        for entry in entries:
            self._fitting([entry])

    def hold(self, entries: Iterable[FileEntry]) -> Held:
        """Download what is missing of some files, and hold all of them; waits until there is room.

        While it waits for room, it holds none of them, so that two readers never wait for each other with
        half a set each. Release a set before you wait for one that has no room beside it.

        Raises CacheTooSmall if the limit is less than the files and what this process keeps, or if nothing
        moved in the cache for ``patience_s`` seconds; NoSpace for a disk that others have filled;
        RemoteDamaged, RemoteMissing, RemoteFailed; UsageError in a forked process, for what is missing;
        OSError.
        """
        wanted, began = self._fitting(entries), perf_counter()
        found, patience = self._held(wanted), Patience()
        while isinstance(found, NoRoom):
            still_s = patience.still_s(found.state)
            if found.is_full and still_s >= min(FULL_DISK_PATIENCE_S, self._patience_s):
                raise no_space(self.folder.path)
            if self._needed(wanted) > found.limit or still_s >= self._patience_s:
                raise self._too_small(max(found.least, self._needed(wanted)), found.limit)
            self._refuse_closed()
            patience.wait()
            found = self._held(wanted)
        return self._waited(found, began)

    def hold_now(self, entries: Iterable[FileEntry]) -> Held | None:
        """Hold some files as :meth:`hold` does, None if there is no room now."""
        wanted, began = self._fitting(entries), perf_counter()
        found = self._held(wanted)
        return None if isinstance(found, NoRoom) else self._waited(found, began)

    def keep(self, entries: Iterable[FileEntry]) -> None:
        """Hold some files until this cache is closed. Raises what :meth:`hold` does."""
        with self.hold(entries) as held, self._lock:
            self._refuse_closed()
            self._kept.take(held)

    def prefetch(self, entry: FileEntry, *, evict: bool = True) -> bool:
        """Download a file ahead, and return whether it is there; it is not held.

        Only files that are used later than it, by what all readers foresee, are evicted for it; without
        ``evict`` none is. Raises what
        :meth:`hold` does but CacheTooSmall.
        """
        found = self._held([entry], "later" if evict else "none")
        if isinstance(found, NoRoom):
            return False
        found.release()
        return True

    def discard(self, entry: FileEntry) -> None:
        """Remove a file that is there but not right, so that the next one to hold it downloads it anew.

        A reader that has it open keeps what is open.
        """
        with self.folder.turn():
            self.folder.path_of(hex_of(entry)).unlink(missing_ok=True)

    def foresee(self, entries: Sequence[FileEntry]) -> None:
        """Tell all processes the files that this one will use, in their order; replaces what was told.

        Raises UsageError for a closed cache.
        """
        names = [hex_of(entry) for entry in entries]
        uses = np.array([identity_of(name) for name in names], np.uint64)
        with self._lock:
            self._refuse_closed()
            with self.folder.turn():
                self._reader.foresee(uses)

    def used(self, position: int) -> None:
        """Tell that the first ``position`` of the foreseen uses are over. Raises UsageError once closed."""
        with self._lock:
            self._refuse_closed()
            self._reader.used(position)

    def close(self) -> None:
        """Let go what is kept, and end what runs in other threads. Idempotent; not reusable afterwards."""
        if not self.made_here or self._downloads.is_closed:
            return
        self._downloads.close()
        with self._lock:
            self._kept.release()
        with self.folder.last_turn():
            self._reader.remove()

    def _refuse_closed(self) -> None:
        if self._downloads.is_closed:
            raise self._downloads.closed()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _waited(self, held: Held, began: float) -> Held:
        if held.came:
            self._count(waited_s=perf_counter() - began)
        return held

    def _fitting(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        """Return each of the files once. Raises CacheTooSmall if they can never be there together."""
        wanted = [*{hex_of(entry): entry for entry in entries}.values()]
        if (needed := self._needed(wanted)) > self.limit_bytes:
            raise self._too_small(needed, self.limit_bytes)
        return wanted

    def _needed(self, wanted: Iterable[FileEntry]) -> int:
        """The bytes of these files with those that are kept."""
        return sum((self._kept.sizes | {hex_of(entry): entry.size for entry in wanted}).values())

    def _too_small(self, needed: int, limit: int) -> CacheTooSmall:
        return CacheTooSmall(
            f"the cache has room for {_room(limit)}, and needs {needed:,} bytes at least for what is read at once; "
            "give it a larger limit, or make room on its disk",
            path=self.folder.path,
            needed=needed,
        )

    def _held(self, wanted: Sequence[FileEntry], evict: Evict = "any") -> Held | NoRoom:
        """Hold the files, or none of them if there is no room for all that are missing."""
        held = Held()
        try:
            hits = self._pin(held, wanted)
            while missing := held.lacks(wanted):
                found = take_room(self.folder, missing, self.limit_bytes, evict=evict)
                if isinstance(found, NoRoom):
                    held.release()
                    return found
                held.came = True
                self._downloads.run(found, held)
                hits += self._await(held, found.coming)
        except BaseException:
            held.release()
            raise
        self._count(hits=hits)
        return held

    def _pin(self, held: Held, entries: Iterable[FileEntry]) -> int:
        """Hold those of the files that are there; return how many are."""
        count = 0
        for entry in entries:
            if (pin := self.folder.pinned(entry)) is not None:
                held.add(entry, pin)
                count += 1
        return count

    def _await(self, held: Held, coming: Sequence[FileEntry]) -> int:
        """Hold the files that others download, when they are there; return how many are."""
        count = self._pin(held, coming)
        pause = Pause()
        while any(self.folder.is_coming(entry) for entry in held.lacks(coming)):
            self._refuse_closed()
            pause.wait()
            count += self._pin(held, held.lacks(coming))
        return count

    def _count(self, *, hits: int = 0, waited_s: float = 0.0) -> None:
        if self.made_here:  # else the lock can be held by a thread that was not copied
            with self._lock:
                self._hits += hits
                self._waited_s += waited_s


def _room(limit: int) -> str:
    return f"{limit:,} bytes" if limit < UNLIMITED else "no more"
