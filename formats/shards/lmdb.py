"""Shards in LMDB: one file, with 8-byte big-endian ordinals as keys, and a small header in each value.

Any LMDB tool reads them. LMDB's library writes them; :mod:`shardprep.formats.shards.lmdb_reader` reads them.
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

# One transaction for the whole shard would hold it in memory and take twice as long. The count is fixed, so
# that equal records give equal bytes.
RECORDS_PER_COMMIT = 256

_ERRNO_OF = {os.strerror(number): number for number in errno.errorcode}


def value_of(stored: StoredRecord) -> bytes:
    head = VALUE_HEADER.pack(VALUE_VERSION, 0, len(stored.key), stored.label, stored.crc32c)
    return b"".join((head, stored.key, stored.image))


def bytes_needed(extent: Extent) -> int:
    """Return an upper bound on the file's size: whole overflow pages, and the pages of the tree."""
    page = os.sysconf("SC_PAGE_SIZE")
    values = extent.payload_bytes + extent.records * (VALUE_HEADER.size + extent.key_bytes)
    leaves = values // page + extent.records * 2
    commits = extent.records // RECORDS_PER_COMMIT + 1
    return (leaves + 16 * commits + 64) * page


def map_size(extent: Extent) -> int:
    """Return the map size in whole MiB; only the plan determines it, because LMDB stores it in the file."""
    return (bytes_needed(extent) + (1 << 20)) // (1 << 20) << 20


class LmdbShardWriter(ShardWriter):
    """Appends in order and commits at fixed counts, so that equal records give equal bytes.

    No writemap, or a full disk raises SIGBUS. Memory is initialised, or heap contents leak into unused parts
    of pages. Nothing is synced: publishing flushes the file once.
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
        number = _ERRNO_OF.get(str(error).rpartition(": ")[2], errno.EIO)  # EIO for LMDB's own errors
        if number in (errno.EIO, errno.ENOSPC):  # LMDB reports a short write as either
            number = self._limit() or number
        if number == errno.ENOSPC:
            return no_space(self._path)
        return OSError(number, f"LMDB: {error}", os.fspath(self._path))

    def _limit(self) -> int:
        """Return the errno of the limit that the next commit would exceed, or 0."""
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
    """Return the versions and settings that determine a file's bytes besides its records."""
    return {
        "lmdb": ".".join(map(str, lmdb.version())),
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "records_per_commit": RECORDS_PER_COMMIT,
    }


CONTAINER = Container(
    write=LmdbShardWriter, addresses=LmdbAddresses, bytes_needed=bytes_needed, library=library
)
