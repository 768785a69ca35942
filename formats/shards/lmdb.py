"""Shards in LMDB: one file, with 8-byte big-endian ordinals as keys, and a small header in each value.

Any LMDB tool reads them, and LMDB's library writes them, but it trusts a file that it reads: a truncated or
malicious one kills the process. Here files are read by position: each page is checked before it is used, no
offset is followed out of the file, and the file is neither mapped nor locked. Damage, truncation and bad
sectors raise an error.
"""

from __future__ import annotations

import errno
import os
import resource
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from shardprep.formats.errors import DataError, NoSpace, ShardDamaged
from shardprep.formats.runtime.files import ReadAt, no_space
from shardprep.formats.shards.read import Address, Container, Extent, ShardFile, ShardWriter, StoredRecord

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


# Plain tuples: finding a record takes 3 µs, and two named tuples would add a quarter.
Node = tuple[int, int, int, int, int]
"""A node: its fields low, high and flags, and its key's start and end in the page."""
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
        possible = meta.page_size in _PAGE_SIZES and meta.depth <= _MAX_DEPTH
        if flags != _META_PAGE or meta.magic != MAGIC or not possible:
            raise self._damaged(f"its meta page at byte {offset} is invalid")
        if meta.version != VERSION or meta.flags:
            raise self._damaged("it is an unsupported LMDB file: another version, or another key order")
        return meta

    def leaves(self) -> Iterator[tuple[bytes, int]]:
        """Yield each leaf in key order: a lower bound of its keys, and its page number."""
        left, waiting = self._end // self.size, [(b"", self.meta.root, self.meta.depth)]
        while waiting:
            first, number, depth = waiting.pop()
            if depth < 1:
                continue
            left -= 1
            if left < 0:
                raise self._damaged("its pages form a cycle")
            if depth == 1:
                yield first, number
                continue
            below = list(self._children(self.page(number, _BRANCH)))
            waiting += [(key or first, child, depth - 1) for key, child in reversed(below)]

    def page(self, number: int, kind: int = _LEAF) -> Page:
        """Return a page of the tree, checked to be of this kind."""
        data = self._read(number, self.size)
        own_number, _, flags, lower, upper = HEADER.unpack_from(data)
        if own_number != number or flags != kind:
            raise self._damaged(f"page {number} has the wrong number or kind")
        if not HEADER.size + _POINTER.size <= lower <= upper <= self.size:
            raise self._damaged(f"page {number} is damaged")
        return Page(number, data, (lower - HEADER.size) // _POINTER.size, upper)

    def nodes(self, page: Page) -> Iterator[Node]:
        """Return all nodes of a page in key order."""
        return (self.node(page, place) for place in range(page.length))

    def node(self, page: Page, place: int) -> Node:
        """Return the node at an index below ``page.length``."""
        (start,) = _POINTER.unpack_from(page.data, HEADER.size + place * _POINTER.size)
        key_start = start + _NODE.size
        if not page.upper <= start <= key_start <= self.size:
            raise self._damaged(f"page {page.number} has a node outside of it")
        low, high, flags, key_bytes = _NODE.unpack_from(page.data, start)
        if key_start + key_bytes > self.size:
            raise self._damaged(f"page {page.number} has a node outside of it")
        return low, high, flags, key_start, key_start + key_bytes

    def _children(self, page: Page) -> Iterator[tuple[bytes, int]]:
        """Yield each child's first key and page number. The first child's key is unused, so it is empty."""
        for place, (low, high, flags, start, end) in enumerate(self.nodes(page)):
            yield page.data[start:end] if place else b"", low | high << 16 | flags << 32

    def value(self, page: Page, node: Node, wanted: int = 0) -> Value:
        """Return the value of a leaf node, with its first ``wanted`` bytes."""
        low, high, flags, _, start = node
        length = low | high << 16
        if flags == _IN_OVERFLOW and start + _PAGE_NUMBER.size <= self.size:
            return self._overflow(_PAGE_NUMBER.unpack_from(page.data, start)[0], length, wanted)
        if flags or start + length > self.size:
            raise self._damaged(f"page {page.number} has an invalid record")
        first = page.data[start : start + min(length, wanted)]
        return page.number * self.size + start, length, first

    def _overflow(self, number: int, length: int, wanted: int) -> Value:
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

KEY_BYTES = 8
FIRST_BYTES = VALUE_HEADER.size + 100  # of a value: usually all but the image
SMALLEST_RECORD = 18  # bytes in a leaf: key, node header and pointer


class LmdbAddresses:
    """The addresses of a shard. All leaves are listed on construction, and the last one read is cached."""

    def __init__(self, path: Path, file: ShardFile) -> None:
        self._path, self._file = path, file
        try:
            self._pages = LmdbPages(file.read_at, file.size, ShardDamaged)
            meta = self._pages.meta
            self._records = meta.entries
            if meta.entries * SMALLEST_RECORD > file.size:
                raise ShardDamaged(f"it claims {meta.entries} records")
            self._leaves = [*self._pages.leaves()] or [(b"", meta.root)]
        except ShardDamaged as error:
            raise ShardDamaged(f"is not an LMDB file: {error.message}", path=path) from None
        self._leaf = Page(0, b"", 0, 0), 0  # and its first ordinal

    def __len__(self) -> int:
        return self._records

    def find(self, ordinal: int) -> Address:
        try:
            page, node = self._node(ordinal)
            start, length, first = self._pages.value(page, node, FIRST_BYTES)
        except ShardDamaged as error:
            if error.path is not None:
                raise
            reason = f"cannot be read at record {ordinal}: {error.message}; prep repair rebuilds it"
            raise ShardDamaged(reason, path=self._path) from None
        if length < VALUE_HEADER.size:
            raise ShardDamaged(f"record {ordinal} is truncated", path=self._path)
        version, _, key_bytes, label, crc32c = VALUE_HEADER.unpack_from(first)
        head = VALUE_HEADER.size + key_bytes
        if version != VALUE_VERSION or head > length:
            raise ShardDamaged(f"record {ordinal} has an unknown header", path=self._path)
        key = first[VALUE_HEADER.size : head]
        if head > len(first):
            key = self._file.read_at(key_bytes, start + VALUE_HEADER.size)
        return key, label, crc32c, start + head, length - head

    def _node(self, ordinal: int) -> tuple[Page, Node]:
        wanted = ordinal.to_bytes(KEY_BYTES, "big")
        page, first = self._leaf
        if not 0 <= ordinal - first < page.length:
            at = bisect_right(self._leaves, wanted, key=itemgetter(0)) - 1
            page = self._pages.page(self._leaves[at][1])
            *_, start, end = self._pages.node(page, 0)
            first = int.from_bytes(page.data[start:end], "big")
            self._leaf = page, first
        if 0 <= ordinal - first < page.length:
            node = self._pages.node(page, ordinal - first)
            if page.data[node[3] : node[4]] == wanted:
                return page, node
        raise ShardDamaged(f"has no record {ordinal}", path=self._path)


CONTAINER = Container(
    write=LmdbShardWriter, addresses=LmdbAddresses, bytes_needed=bytes_needed, library=library
)
