"""Shards in LMDB: one file, keys are 8-byte big-endian ordinals, values carry a small header.

Any LMDB tool reads them; we only ever open a finished file, read-only and without locks.
"""

from __future__ import annotations

import errno
import os
import resource
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from .errors import NoSpace, ShardDamaged
from .shard import Container, Placed, Room, ShardReader, ShardWriter, Stored

if TYPE_CHECKING:
    from .plan import Extent

HEADER = struct.Struct("<BBHiI")  # version, 0, key length, label, CRC-32C; then key, then image
VALUE_VERSION = 1

# A commit writes all pages dirtied since the last: one large transaction holds the whole shard in
# memory and runs at half the speed. The count is part of the format's determinism: never a time.
RECORDS_PER_COMMIT = 256

SYSTEM_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EROFS),
)


def value_of(stored: Stored) -> bytes:
    """The value that a record has in LMDB."""
    head = HEADER.pack(VALUE_VERSION, 0, len(stored.key), stored.label, stored.crc32c)
    return b"".join((head, stored.key, stored.image))


def bytes_needed(extent: Extent) -> int:
    """Upper bound of the file's size: whole overflow pages, and pages for the tree above them."""
    page = os.sysconf("SC_PAGE_SIZE")
    values = extent.payload_bytes + extent.records * (HEADER.size + extent.key_bytes)
    leaves = values // page + extent.records * 2
    commits = extent.records // RECORDS_PER_COMMIT + 1
    return (leaves + 16 * commits + 64) * page


def map_size(extent: Extent) -> int:
    """From the plan alone, because LMDB stores it in the file; whole MiB."""
    return (bytes_needed(extent) + (1 << 20)) // (1 << 20) << 20


def _system_error(error: lmdb.Error) -> int:
    """The errno that an error ends with in words, 0 where it is LMDB's own."""
    return next((n for n in SYSTEM_ERRORS if str(error).endswith(os.strerror(n))), 0)


class LmdbShardWriter(ShardWriter):
    """Appends in order and commits at fixed record counts, so that equal records give equal bytes.

    No writemap (a full disk would be SIGBUS), memory initialised (otherwise the process's heap
    leaks into unused parts of pages), nothing synced here: the publisher flushes the file once.
    """

    def __init__(self, path: Path, extent: Extent) -> None:
        self._path = path
        self._extent = extent
        self._count = 0
        try:
            self._environment = lmdb.open(
                os.fsencode(path),  # py-lmdb refuses names that are not UTF-8 as text
                subdir=False,
                map_size=map_size(extent),
                lock=False,
                sync=False,
                metasync=False,
                meminit=True,
                writemap=False,
                max_dbs=0,
                mode=0o644,
            )
        except lmdb.Error as error:
            raise self._explained(error) from error
        self._transaction: Any = None

    def append(self, stored: Stored) -> None:
        if self._transaction is None:
            self._transaction = self._environment.begin(write=True)
        key = self._count.to_bytes(8, "big")
        try:
            fresh = self._transaction.put(key, value_of(stored), append=True)
            self._count += 1
            if self._count % RECORDS_PER_COMMIT == 0:
                self._commit()
        except lmdb.Error as error:
            raise self._explained(error) from error
        if not fresh:
            raise ShardDamaged(f"ordinal {self._count - 1} was there already", path=self._path)

    def _commit(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.commit()

    def _explained(self, error: lmdb.Error) -> OSError | NoSpace:
        number = _system_error(error) or errno.EIO
        if number in (errno.EIO, errno.ENOSPC):  # LMDB calls a short write either, whatever cut it short
            number = self._limit() or number
        if number in (errno.ENOSPC, errno.EDQUOT):
            return NoSpace("the disk is full; make room and run the same command again", path=self._path)
        return OSError(number, f"LMDB: {error}", os.fspath(self._path))

    def _limit(self) -> int:
        """The errno of the limit that the next commit would hit, 0 for none."""
        commits = max(1, self._extent.records // RECORDS_PER_COMMIT)
        needed = bytes_needed(self._extent) // commits
        disk, (largest, _) = os.statvfs(self._path.parent), resource.getrlimit(resource.RLIMIT_FSIZE)
        if largest != resource.RLIM_INFINITY and self._path.stat().st_size + needed > largest:
            return errno.EFBIG
        return errno.ENOSPC if disk.f_bavail * disk.f_frsize < needed else 0

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                self._commit()
        except lmdb.Error as error:
            raise self._explained(error) from error
        finally:
            if self._transaction is not None:
                self._transaction.abort()
            self._environment.close()


class _Environments:
    """LMDB refuses to open a file twice in a process, so readers of one file share one map.

    A forked child keeps using what it inherited: LMDB's rule against that is about its lock table,
    which these environments do not have, and it refuses to open the file anew there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], tuple[Any, int]] = {}
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it when the process forked

    def acquire(self, path: Path) -> tuple[tuple[int, int], Any]:
        with path.open("rb") as file:  # what cannot be opened is no damage, as LMDB would have it
            status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        with self._lock:
            environment, users = self._open.get(identity, (None, 0))
            if environment is None:
                environment = _open_finished(path)
            self._open[identity] = (environment, users + 1)
        return identity, environment

    def release(self, identity: tuple[int, int]) -> None:
        with self._lock:
            environment, users = self._open.pop(identity)
            if users > 1:
                self._open[identity] = (environment, users - 1)
            else:
                environment.close()


def _open_finished(path: Path) -> Any:
    try:
        return lmdb.open(
            os.fsencode(path),
            subdir=False,
            readonly=True,
            lock=False,
            create=False,
            max_dbs=0,
            readahead=True,
        )
    except lmdb.Error as error:
        if number := _system_error(error):
            raise OSError(number, os.strerror(number), os.fspath(path)) from error
        raise ShardDamaged(f"is not an LMDB file: {error}", path=path) from error


_environments = _Environments()


class LmdbShardReader(ShardReader):
    """Reads through a shared map; an image is copied out once, because a view would not outlive it."""

    _closed = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity, environment = _environments.acquire(path)
        self._closed = False
        self._lock = threading.Lock()
        try:
            self._transaction = environment.begin(buffers=True)
            self._count: int = environment.stat()["entries"]
        except lmdb.Error as error:
            _environments.release(self._identity)
            raise ShardDamaged(f"cannot be read: {error}", path=path) from error
        if self._count >= 1 << 63:
            self.close()
            raise ShardDamaged(f"claims {self._count} records", path=path)

    def __len__(self) -> int:
        return self._count

    def stored(self, ordinal: int) -> Stored:
        with self._lock:
            key, label, crc32c, image = self._found(ordinal)
            return Stored(key, label, crc32c, bytes(image))

    def placed(self, ordinal: int, room: Room) -> Placed:
        with self._lock:
            key, label, crc32c, image = self._found(ordinal)
            place = room(len(image))
            place.data[:] = image
            return Placed(key, label, crc32c, place)

    def _found(self, ordinal: int) -> tuple[bytes, int, int, memoryview]:
        """Key, label, CRC-32C, and the image in the map; for who holds the lock."""
        if not 0 <= ordinal < self._count:
            raise ShardDamaged(f"has no record {ordinal}", path=self.path)
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        try:
            value = self._transaction.get(ordinal.to_bytes(8, "big"))
        except lmdb.Error as error:
            raise ShardDamaged(f"cannot be read at record {ordinal}: {error}", path=self.path) from error
        if value is None:
            raise ShardDamaged(f"has no record {ordinal}", path=self.path)
        return self._parsed(value, ordinal)

    def _parsed(self, value: memoryview, ordinal: int) -> tuple[bytes, int, int, memoryview]:
        if len(value) < HEADER.size:
            raise ShardDamaged(f"record {ordinal} is cut short", path=self.path)
        version, _, key_bytes, label, crc32c = HEADER.unpack_from(value)
        start = HEADER.size + key_bytes
        if version != VALUE_VERSION or start > len(value):
            raise ShardDamaged(f"record {ordinal} has an unknown header", path=self.path)
        return bytes(value[HEADER.size : start]), label, crc32c, value[start:]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._transaction.abort()
            _environments.release(self._identity)


def library() -> dict[str, str | int]:
    """What besides the records decides the bytes of a file."""
    return {
        "lmdb": ".".join(map(str, lmdb.version())),
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "records_per_commit": RECORDS_PER_COMMIT,
    }


CONTAINER = Container(write=LmdbShardWriter, read=LmdbShardReader, bytes_needed=bytes_needed, library=library)
