"""What each reader of a cache tells the others: its limit, and the files that it will use, in their order.

A reader's file is locked as long as the reader lives; one without a lock is a leftover, which is
removed. It has a header of little-endian uint64 (a mark, the limit in bytes, how many uses are over), and
then a uint64 for each use: the first 8 bytes of the file's SHA-256, as a big-endian number. All that is read
from it only decides what is evicted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.system.descriptor import LockDescriptor
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.positional import read_at, write_at
from shardprep.formats.system.regular_file import OPEN_FLAGS

MARK = 0x31_52_44_52_50_52_48_53  # "SHRPRDR1"
HEADER = struct.Struct("<QQQ")
POSITION_AT = 16
MOST_BYTES = 1 << 28

Uses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class LivingReader:
    """What another reader, or this one, has told."""

    limit: int
    position: int
    uses: Uses

    @property
    def distances(self) -> dict[int, int]:
        """The number of uses before each file is used again, by the number that stands for it."""
        found, first = np.unique(self.uses[self.position :], return_index=True)
        return dict(zip(found.tolist(), first.tolist(), strict=True))


class ReaderFile(Owned):
    """The file of this reader. Its caller holds the cache's lock while it is made, changed or removed."""

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        self._path = folder / name
        self._limit = limit
        self._lock = self._written(np.zeros(0, np.uint64))

    def _written(self, uses: Uses) -> LockDescriptor:
        new = self._path.with_suffix(".tmp")
        with suppress(FileNotFoundError):
            new.unlink()
        lock = LockDescriptor(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        lock.lock()
        write_at(lock.fileno(), HEADER.pack(MARK, self._limit, 0) + uses.astype("<u8").tobytes(), 0)
        new.replace(self._path)
        return lock

    def foresee(self, uses: Uses) -> None:
        """Replace what will be used by other uses, of which none is over."""
        before, self._lock = self._lock, self._written(uses)
        before.close()

    def used(self, position: int) -> None:
        """Tell how many of the uses are over. Needs no lock."""
        os.pwrite(self._lock.fileno(), position.to_bytes(8, "little"), POSITION_AT)

    def remove(self) -> None:
        """End this reader."""
        try:
            self._path.unlink(missing_ok=True)
        finally:
            self._lock.close()


def living_readers(folder: Path) -> Iterator[LivingReader]:
    """Yield what the living readers have told, and remove the files of dead ones.

    The caller holds the cache's lock.
    """
    for path in sorted(folder.iterdir()):
        if (found := _living(path)) is not None:
            yield found


def _living(path: Path) -> LivingReader | None:
    try:
        lock = LockDescriptor(os.open(path, OPEN_FLAGS | os.O_NOFOLLOW))
    except OSError:
        return None
    try:
        if lock.lock(wait=False):
            path.unlink()
            return None
        return _parsed(read_at(lock.fileno(), min(MOST_BYTES, os.fstat(lock.fileno()).st_size), 0))
    finally:
        lock.close()


def _parsed(data: bytes) -> LivingReader | None:
    if len(data) < HEADER.size:
        return None
    mark, limit, position = HEADER.unpack_from(data)
    count = (len(data) - HEADER.size) // 8
    if mark != MARK:
        return None
    return LivingReader(limit, position, np.frombuffer(data, "<u8", count, HEADER.size))


def nearest(readers: Iterable[LivingReader]) -> dict[int, float]:
    """Return the number of uses before each file is used again by that reader which uses it first."""
    found: dict[int, float] = {}
    for reader in readers:
        for identity, distance in reader.distances.items():
            found[identity] = min(found.get(identity, distance), distance)
    return found
