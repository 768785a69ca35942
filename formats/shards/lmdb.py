"""Shards in LMDB: one file, keys are 8-byte big-endian ordinals, values carry a small header.

Any LMDB tool reads them. LMDB's library writes them, and :mod:`shardprep.formats.shards.lmdb_reader` reads
them.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import lmdb

from shardprep.formats.errors import NoSpace, ShardDamaged
from shardprep.formats.runtime.files import no_space
from shardprep.formats.shards.lmdb_reader import VALUE_HEADER, VALUE_VERSION, LmdbAddresses
from shardprep.formats.shards.read import Container, Extent, ShardWriter, StoredRecord

# A commit writes all pages changed since the last: one large transaction holds the whole shard in
# memory and takes twice as long. Equal bytes need a fixed count, not a time.
RECORDS_PER_COMMIT = 256

_ERRNO_OF = {os.strerror(number): number for number in errno.errorcode}


def value_of(stored: StoredRecord) -> bytes:
    """Return a record's value in LMDB."""
    head = VALUE_HEADER.pack(VALUE_VERSION, 0, len(stored.key), stored.label, stored.crc32c)
    return b"".join((head, stored.key, stored.image))


def bytes_needed(extent: Extent) -> int:
    """Return an upper bound of the file's size: whole overflow pages, and pages of the tree."""
    page = os.sysconf("SC_PAGE_SIZE")
    values = extent.payload_bytes + extent.records * (VALUE_HEADER.size + extent.key_bytes)
    leaves = values // page + extent.records * 2
    commits = extent.records // RECORDS_PER_COMMIT + 1
    return (leaves + 16 * commits + 64) * page


def map_size(extent: Extent) -> int:
    """Return the map size in whole MiB; it depends on the plan alone, because LMDB stores it in the file."""
    return (bytes_needed(extent) + (1 << 20)) // (1 << 20) << 20


def _system_error(error: lmdb.Error) -> int:
    """Return the errno that an error's text ends with, 0 if the error is LMDB's own."""
    return _ERRNO_OF.get(str(error).rpartition(": ")[2], 0)


class LmdbShardWriter(ShardWriter):
    """Writer that appends in order and commits at fixed counts, so that equal records give equal bytes.

    No writemap (a full disk would be SIGBUS). Memory is initialised (otherwise the process's heap
    leaks into unused parts of pages). Nothing is synced here: publishing flushes the file once.
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

    def append(self, stored: StoredRecord) -> None:
        key = self._count.to_bytes(8, "big")
        try:
            if self._transaction is None:
                self._transaction = self._environment.begin(write=True)
            fresh = self._transaction.put(key, value_of(stored), append=True)
            self._count += 1
            if self._count % RECORDS_PER_COMMIT == 0:
                self._commit()
        except lmdb.Error as error:
            raise self._explained(error) from error
        if not fresh:
            raise ShardDamaged(f"ordinal {self._count - 1} exists already", path=self._path)

    def _commit(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.commit()

    def _explained(self, error: lmdb.Error) -> OSError | NoSpace:
        number = _system_error(error) or errno.EIO
        if number in (errno.EIO, errno.ENOSPC):  # LMDB reports a short write as either
            number = self._limit() or number
        if number == errno.ENOSPC:
            return no_space(self._path)
        return OSError(number, f"LMDB: {error}", os.fspath(self._path))

    def _limit(self) -> int:
        """Return the errno of the limit that the next commit would exceed, 0 for none."""
        commits = max(1, self._extent.records // RECORDS_PER_COMMIT)
        needed = bytes_needed(self._extent) // commits
        disk, (largest, _) = os.statvfs(self._path.parent), resource.getrlimit(resource.RLIMIT_FSIZE)
        size = self._path.stat().st_size if self._path.exists() else 0
        if largest != resource.RLIM_INFINITY and size + needed > largest:
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


def library() -> dict[str, str | int]:
    """Return the versions and settings that decide the bytes of a file besides the records."""
    return {
        "lmdb": ".".join(map(str, lmdb.version())),
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "records_per_commit": RECORDS_PER_COMMIT,
    }


CONTAINER = Container(
    write=LmdbShardWriter, addresses=LmdbAddresses, bytes_needed=bytes_needed, library=library
)
