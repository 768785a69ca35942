"""Shards in LMDB: one file, with 8-byte big-endian ordinals as keys, and a small header in each value.

Any LMDB tool reads them, and LMDB's library writes them, but it trusts a file that it reads: a truncated or
malicious one kills the process. Here files are read by position: each page is checked before it is used, no
offset is followed out of the file, and the file is neither mapped nor locked. Damage, truncation and bad
sectors raise an error.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from shardprep.formats.errors import DataError, NoSpace, ShardDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.runtime.files import FULL_DISK, ReadAt, full_disk_error
from shardprep.formats.runtime.jobs import Unit
from shardprep.formats.shards.read import (
    Address,
    Addresses,
    Container,
    ShardFile,
    ShardWriter,
    StoredRecord,
    address_dtype,
)

# One transaction for the whole shard would hold it in memory and take twice as long. The count is fixed, so
# that equal records give equal bytes.
RECORDS_PER_COMMIT = 256

_ERRNO_OF = {os.strerror(number): number for number in errno.errorcode}


def bytes_needed(unit: Unit) -> int:
    """Return an upper bound on the file's size: whole overflow pages, and the pages of the tree."""
    page = os.sysconf("SC_PAGE_SIZE")
    values = unit.size + unit.records * (VALUE_HEADER.size + unit.key_bytes)
    leaves = values // page + unit.records * 2
    commits = unit.records // RECORDS_PER_COMMIT + 1
    return (leaves + 16 * commits + 64) * page


class LmdbShardWriter(ShardWriter):
    """Appends in order and commits at fixed counts, so that equal records give equal bytes.

    No writemap, or a full disk raises SIGBUS. Memory is initialised, or heap contents leak into unused parts
    of pages. Nothing is synced: publishing flushes the file once.
    """

    def __init__(self, path: Path, unit: Unit) -> None:
        self._path = path
        self._unit = unit
        self._count = 0
        mebibytes = bytes_needed(unit) // (1 << 20) + 1  # stored in the file: only the plan decides it
        try:
            self._environment = lmdb.open(
                os.fsencode(path),  # py-lmdb refuses names that are not UTF-8 as text
                subdir=False,
                map_size=mebibytes << 20,
                lock=False,
                sync=False,
                metasync=False,
                meminit=True,
                writemap=False,
                max_dbs=0,
                mode=0o644,
            )
        except lmdb.Error as error:
            raise self._system_error(error) from error
        self._transaction: Any = None

    def append(self, stored: StoredRecord) -> None:
        ordinal = self._count.to_bytes(8, "big")
        head = VALUE_HEADER.pack(VALUE_VERSION, 0, len(stored.key), stored.label, stored.crc32c)
        try:
            if self._transaction is None:
                self._transaction = self._environment.begin(write=True)
            self._transaction.put(ordinal, b"".join((head, stored.key, stored.image)), append=True)
            self._count += 1
            if self._count % RECORDS_PER_COMMIT == 0:
                self._transaction.commit()
                self._transaction = None
        except lmdb.Error as error:
            raise self._system_error(error) from error

    def _system_error(self, error: lmdb.Error) -> OSError | NoSpace:
        number = _ERRNO_OF.get(str(error).rpartition(": ")[2], errno.EIO)  # EIO for LMDB's own errors
        if number in (errno.EIO, errno.ENOSPC):  # LMDB's words for a short write; the system knows the reason
            commits = max(1, self._unit.records // RECORDS_PER_COMMIT)
            try:
                with self._path.open("ab") as file:
                    os.posix_fallocate(file.fileno(), file.tell(), bytes_needed(self._unit) // commits)
            except OSError as reason:
                number = reason.errno or number
        if number in FULL_DISK:
            return full_disk_error(self._path, number)
        return OSError(number, f"LMDB: {error}", os.fspath(self._path))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None and self._transaction is not None:
                self._transaction.commit()
        except lmdb.Error as error:
            raise self._system_error(error) from error
        finally:
            self._environment.close()  # also aborts a transaction


def library() -> dict[str, str | int]:
    """Return the versions and settings that determine a file's bytes besides its records."""
    return {
        "lmdb": ".".join(map(str, lmdb.version())),
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "records_per_commit": RECORDS_PER_COMMIT,
    }


# mdb.c's MDB_page, MDB_meta and MDB_node on little-endian 64-bit platforms.
HEADER = struct.Struct("<QHHHH")
MAGIC, VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<II16xI48xHH24xQQ8xQ")
_POINTER = struct.Struct("<H")
_NODE = struct.Struct("<HHHH")
_PAGE_NUMBER = struct.Struct("<Q")
_PAGE_SIZES = [1 << bits for bits in range(9, 17)]
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_IN_OVERFLOW = 1
_MAX_DEPTH = 32


class Meta(NamedTuple):
    """A meta page; the one with the later transaction is current."""

    magic: int
    version: int
    page_size: int
    flags: int
    depth: int
    entries: int
    root: int
    transaction: int


class Page(NamedTuple):
    """A page of the tree with ``length`` nodes, which begin at ``upper``."""

    number: int
    data: bytes
    length: int
    upper: int


Node = tuple[Page, int, int, int, int]
"""A node: its page, its fields low, high and flags, and its key's end in the page."""
Value = tuple[int, int, bytes]
"""A value: its offset in the file, its length, and its first bytes, as requested."""


class LmdbPages:
    """The pages of a file of ``end`` bytes, read with ``read_at``.

    Raises ``damaged(reason)`` if a page is malformed, and the errors of ``read_at``. Thread-safe if
    ``read_at`` is.
    """

    def __init__(self, read_at: ReadAt, end: int, damaged: Callable[[str], DataError]) -> None:
        self._read_at = read_at
        self._end = end
        self._damaged = damaged
        first = self._meta_at(0)
        self.size = first.page_size
        second = self._meta_at(self.size)
        if second.page_size != self.size:
            raise damaged("its two meta pages differ in the page size")
        self.meta = max(first, second, key=lambda meta: meta.transaction)

    def _meta_at(self, offset: int) -> Meta:
        data = self._read_at(HEADER.size + _META.size, offset)
        if len(data) < HEADER.size + _META.size:
            raise self._damaged("it is truncated")
        _, _, flags, _, _ = HEADER.unpack_from(data)
        meta = Meta(*_META.unpack_from(data, HEADER.size))
        is_possible = meta.page_size in _PAGE_SIZES and meta.depth <= _MAX_DEPTH
        is_known = (meta.magic, meta.version, meta.flags) == (MAGIC, VERSION, 0)
        if flags != _META_PAGE or not is_possible or not is_known:
            raise self._damaged(
                f"its meta page at byte {offset} is invalid, or of another LMDB version or key order"
            )
        return meta

    def records(self) -> Iterator[tuple[bytes, Node]]:
        """Yield all keys in order, with their nodes; a leaf that comes again has keys out of order."""
        return self._records(self.meta.root, self.meta.depth)

    def _records(self, number: int, depth: int) -> Iterator[tuple[bytes, Node]]:
        if depth > 1:
            for _, (_, low, high, flags, _) in self._nodes(self._page(number, _BRANCH)):
                yield from self._records(low | high << 16 | flags << 32, depth - 1)
        elif depth:  # 0 in an empty file
            yield from self._nodes(self._page(number, _LEAF))

    def _page(self, number: int, kind: int) -> Page:
        """Return a page of the tree, checked to be of this kind."""
        data = self._read(number, self.size)
        own_number, _, flags, lower, upper = HEADER.unpack_from(data)
        if own_number != number or flags != kind:
            raise self._damaged(f"page {number} has the wrong number or kind")
        if not HEADER.size + _POINTER.size <= lower <= upper <= self.size:
            raise self._damaged(f"page {number} is damaged")
        return Page(number, data, (lower - HEADER.size) // _POINTER.size, upper)

    def _nodes(self, page: Page) -> Iterator[tuple[bytes, Node]]:
        """Yield all nodes of a page in key order, with their keys."""
        for place in range(page.length):
            (start,) = _POINTER.unpack_from(page.data, HEADER.size + place * _POINTER.size)
            key_start = key_end = start + _NODE.size
            if page.upper <= start and key_start <= self.size:
                low, high, flags, key_bytes = _NODE.unpack_from(page.data, start)
                key_end += key_bytes
            if start < page.upper or key_end > self.size:
                raise self._damaged(f"page {page.number} has a node outside of it")
            yield page.data[key_start:key_end], (page, low, high, flags, key_end)

    def value(self, node: Node, wanted: int = 0) -> Value:
        """Return the value of a leaf node, with its first ``wanted`` bytes."""
        page, low, high, flags, start = node
        length = low | high << 16
        if flags == _IN_OVERFLOW and start + _PAGE_NUMBER.size <= self.size:
            return self._read_overflow(_PAGE_NUMBER.unpack_from(page.data, start)[0], length, wanted)
        if flags or start + length > self.size:
            raise self._damaged(f"page {page.number} has an invalid record")
        return page.number * self.size + start, length, page.data[start : start + min(length, wanted)]

    def _read_overflow(self, number: int, length: int, wanted: int) -> Value:
        """Return a value in overflow pages, all of which are in the file."""
        data = self._read(number, HEADER.size + min(length, wanted))
        own_number, _, flags, low, high = HEADER.unpack_from(data)
        pages = low | high << 16
        if own_number != number or flags != _OVERFLOW or HEADER.size + length > pages * self.size:
            raise self._damaged(f"page {number} has the wrong number or kind")
        start = number * self.size + HEADER.size
        if start + length > self._end:
            raise self._damaged(f"it ends before page {number} does")
        return start, length, data[HEADER.size :]

    def _read(self, number: int, length: int) -> bytes:
        offset = number * self.size
        data = self._read_at(length, offset) if offset + length <= self._end else b""
        if len(data) != length:
            raise self._damaged(f"it ends before page {number} does")
        return data


VALUE_HEADER = struct.Struct("<BBHiI")  # version, 0, key length, label, CRC-32C; then key, then image
VALUE_VERSION = 1

FIRST_BYTES = VALUE_HEADER.size + 100  # of a value: usually all but the image


def addresses(path: Path, file: ShardFile) -> Addresses:
    """Walk the whole tree for the addresses of all records, whose keys are their ordinals."""
    rows: list[Address] = []
    try:
        pages = LmdbPages(file.read_at, file.size, ShardDamaged)
        for ordinal, (name, node) in enumerate(pages.records()):
            if name != ordinal.to_bytes(8, "big"):
                raise ShardDamaged(f"it has no record {ordinal}")
            start, length, first = pages.value(node, FIRST_BYTES)
            header = VALUE_HEADER.unpack_from(first.ljust(VALUE_HEADER.size, b"\0"))
            version, _, key_bytes, label, crc32c = header
            head = VALUE_HEADER.size + key_bytes
            if version != VALUE_VERSION or head > length or key_bytes > MAX_KEY_BYTES:
                raise ShardDamaged(f"record {ordinal} has an invalid header")
            key = first[VALUE_HEADER.size : head]
            if head > len(first):
                key = file.read_at(key_bytes, start + VALUE_HEADER.size)
            rows.append((key, label, crc32c, start + head, length - head))
        if len(rows) != pages.meta.entries:
            raise ShardDamaged(f"it claims {pages.meta.entries} records, and has {len(rows)}")
    except ShardDamaged as error:
        reason = f"is not a readable LMDB shard: {error.message}; prep repair rebuilds it"
        raise ShardDamaged(reason, path=path) from None
    return np.array(rows, address_dtype(max((len(key) for key, *_ in rows), default=1)))


CONTAINER = Container(write=LmdbShardWriter, addresses=addresses, bytes_needed=bytes_needed, library=library)
