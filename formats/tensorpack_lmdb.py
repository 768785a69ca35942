"""The records of an LMDB file, found by reading its pages: the file is neither mapped nor locked.

LMDB's own library trusts a file: one that is cut off, or made to do harm, ends the process. Here each page is
checked before it is used, and a value is a place in the file, which is read as that of any archive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .archive_file import ArchiveFile, naming
from .errors import SourceDamaged
from .tensorpack_value import Value

# mdb.c's MDB_page, MDB_meta and MDB_node, of little-endian platforms with 64 bits.
_HEADER = struct.Struct("<QHHHH")
_META = struct.Struct("<II16xI48xHH24xQQ8xQ")
_NODE = struct.Struct("<HHHH")
_PAGE_NUMBER = struct.Struct("<Q")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = [1 << bits for bits in range(9, 17)]
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_IN_OVERFLOW = 1
_DEEPEST = 32


def is_lmdb(path: Path) -> bool:
    """Whether a regular file begins as LMDB's do. Raises OSError."""
    if not path.is_file():
        return False
    with naming(path), path.open("rb") as file:
        return file.read(_HEADER.size + 4)[_HEADER.size :] == _MAGIC.to_bytes(4, "little")


class _Meta(NamedTuple):
    """What a page of metadata says; of the two the one with the later transaction holds."""

    magic: int
    version: int
    page_size: int
    flags: int
    depth: int
    entries: int
    root: int
    transaction: int


class LmdbRecords:
    """The keys of an open file in their order, each with its value. Iterable once.

    Raises SourceDamaged where the file is cut off or damaged, and for databases in it and duplicate keys.
    """

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        first = self._meta_at(0)
        self._size = first.page_size
        self._meta = max(first, self._meta_at(self._size), key=lambda meta: meta.transaction)
        self._pages_left = file.end // self._size

    @property
    def entries(self) -> int:
        """How many records the file says that it has."""
        return self._meta.entries

    def __iter__(self) -> Iterator[tuple[bytes, Value]]:
        count, last, size = 0, b"", 0
        for key, value in self._below(self._meta.root, self._meta.depth):
            count, size = count + 1, size + value.length
            if key <= last or size > self._file.end:
                raise self._damaged("its keys are not in order, or its records share their bytes")
            last = key
            yield key, value
        if count != self.entries:
            raise self._damaged(f"it has {count} records, and says that it has {self.entries}")

    def _meta_at(self, offset: int) -> _Meta:
        data = self._file.read_at(_HEADER.size + _META.size, offset)
        if len(data) < _HEADER.size + _META.size:
            raise self._damaged("it is cut off")
        meta = _Meta(*_META.unpack_from(data, _HEADER.size))
        if meta.magic != _MAGIC or meta.page_size not in _PAGE_SIZES or meta.depth > _DEEPEST:
            raise self._damaged(f"its metadata at byte {offset} cannot be")
        if meta.version != _VERSION or meta.flags:
            raise self._damaged("it is of a kind that LMDBSerializer does not write")
        return meta

    def _below(self, number: int, depth: int) -> Iterator[tuple[bytes, Value]]:
        """The records of the subtree of ``depth`` levels that begins with this page."""
        if depth > 1:
            for child in self._children(number):
                yield from self._below(child, depth - 1)
        elif depth == 1:
            yield from self._records(number)

    def _children(self, number: int) -> Iterator[int]:
        page = self._page(number, _BRANCH)
        for low, high, top, _, _ in self._nodes(number, page):
            yield low | high << 16 | top << 32

    def _records(self, number: int) -> Iterator[tuple[bytes, Value]]:
        page = self._page(number, _LEAF)
        for low, high, flags, key_start, key_end in self._nodes(number, page):
            length, place = low | high << 16, number * self._size + key_end
            if flags == _IN_OVERFLOW and key_end + _PAGE_NUMBER.size <= self._size:
                place = self._overflow(_PAGE_NUMBER.unpack_from(page, key_end)[0], length)
            elif flags or key_end + length > self._size:
                raise self._damaged(f"page {number} has a record that is none")
            yield page[key_start:key_end], Value(self._file.read_at, place, length)

    def _nodes(self, number: int, page: bytes) -> Iterator[tuple[int, int, int, int, int]]:
        """Three numbers of each node, and where its key begins and ends in the page."""
        *_, lower, upper = _HEADER.unpack_from(page)
        if not _HEADER.size <= lower <= upper <= self._size:
            raise self._damaged(f"page {number} is damaged")
        for (start,) in struct.iter_unpack("<H", page[_HEADER.size : lower & ~1]):
            key_start = start + _NODE.size
            low, high, flags, key_bytes = _NODE.unpack_from(page[start:key_start].ljust(_NODE.size, b"\xff"))
            if not upper <= start <= key_start + key_bytes <= self._size:
                raise self._damaged(f"page {number} has a node outside of it")
            yield low, high, flags, key_start, key_start + key_bytes

    def _page(self, number: int, kind: int) -> bytes:
        self._pages_left -= 1
        if self._pages_left < 0:
            raise self._damaged("its pages lead in circles")
        page = self._read(number, self._size)
        own_number, _, flags, _, _ = _HEADER.unpack_from(page)
        if own_number != number or flags != kind:
            raise self._damaged(f"page {number} is not the one that should be there")
        return page

    def _overflow(self, number: int, length: int) -> int:
        """Where a value of ``length`` bytes begins that has pages of its own, which are all there."""
        own_number, _, flags, low, high = _HEADER.unpack(self._read(number, _HEADER.size))
        start, pages = number * self._size + _HEADER.size, low | high << 16
        if own_number != number or flags != _OVERFLOW or _HEADER.size + length > pages * self._size:
            raise self._damaged(f"page {number} is not the one that should be there")
        if start + length > self._file.end:
            raise self._damaged(f"it ends before page {number} does")
        return start

    def _read(self, number: int, length: int) -> bytes:
        offset = number * self._size
        if offset + length > self._file.end:
            raise self._damaged(f"it ends before page {number}")
        return self._file.read_at(length, offset)

    def _damaged(self, reason: str) -> SourceDamaged:
        return SourceDamaged(f"the LMDB is damaged: {reason}; copy it again", path=self._file.path)
