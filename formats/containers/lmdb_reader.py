"""The reader of shards in LMDB, without LMDB's library: it follows the pages, and reads values by position.

A file that is damaged, truncated or on a bad sector gives an error. LMDB's library maps the file, and
would end the process.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import NamedTuple, TypeVar

from shardprep.formats.errors import ShardDamaged

from .container import Found, ShardReader
from .lmdb_pages import LmdbPages, Node, Page

HEADER = struct.Struct("<BBHiI")  # version, 0, key length, label, CRC-32C; then key, then image
VALUE_VERSION = 1

KEY_BYTES = 8
FIRST_BYTES = HEADER.size + 100  # of a value: usually all but the image
SMALLEST_RECORD = 18  # bytes that a record takes in a leaf: its key, its node and the pointer to that
CACHE_BYTES = 256 << 10  # a shard of 256 MiB with images of 110 KB has 17 pages of 4 KiB


Cached = TypeVar("Cached")


class _BranchPage(NamedTuple):
    """A branch page: ``keys`` are the first keys below each of ``children`` except the first."""

    keys: list[bytes]
    children: list[int]


class _LeafPage(NamedTuple):
    """A page of records with consecutive ordinals from ``first`` on."""

    first: int
    page: Page


class LmdbShardReader(ShardReader):
    """Reader of one shard, with a cache of the pages of its tree."""

    def _open(self) -> None:
        try:
            self._pages = LmdbPages(self._file.read_at, self._file.size, ShardDamaged)
        except ShardDamaged as error:
            raise ShardDamaged(f"is not an LMDB file: {error.message}", path=self.path) from None
        self._meta = self._pages.meta
        if self._meta.entries * SMALLEST_RECORD > self._file.size:
            raise ShardDamaged(f"claims {self._meta.entries} records", path=self.path)
        self._branches: dict[int, _BranchPage] = {}
        self._leaves: dict[int, _LeafPage] = {}
        self._last = _LeafPage(0, Page(0, b"", 0, 0))

    def __len__(self) -> int:
        return self._meta.entries

    def _find(self, ordinal: int) -> Found:
        try:
            return self._parsed(ordinal)
        except ShardDamaged as error:
            if error.path is not None:
                raise
            reason = f"cannot be read at record {ordinal}: {error.message}; prep repair rebuilds it"
            raise ShardDamaged(reason, path=self.path) from None

    def _parsed(self, ordinal: int) -> Found:
        page, node = self._node(ordinal)
        start, length, first = self._pages.value(page, node, FIRST_BYTES)
        if length < HEADER.size:
            raise ShardDamaged(f"record {ordinal} is cut short", path=self.path)
        version, _, key_bytes, label, crc32c = HEADER.unpack_from(first)
        head = HEADER.size + key_bytes
        if version != VALUE_VERSION or head > length:
            raise ShardDamaged(f"record {ordinal} has an unknown header", path=self.path)
        key = first[HEADER.size : head]
        if head > len(first):
            key = self._file.read_at(key_bytes, start + HEADER.size)
        return key, label, crc32c, start + head, length - head

    def _node(self, ordinal: int) -> tuple[Page, Node]:
        leaf = self._last
        if not 0 <= ordinal - leaf.first < leaf.page.length:
            leaf = self._last = self._leaf_of(ordinal)
        first, page = leaf
        if 0 <= ordinal - first < page.length:
            node = self._pages.node(page, ordinal - first)
            if page.data[node[3] : node[4]] == ordinal.to_bytes(KEY_BYTES, "big"):
                return page, node
        raise ShardDamaged(f"has no record {ordinal}", path=self.path)

    def _leaf_of(self, ordinal: int) -> _LeafPage:
        """Return the leaf that has the record, if the tree has it."""
        number, key = self._meta.root, ordinal.to_bytes(KEY_BYTES, "big")
        for _ in range(self._meta.depth - 1):
            keys, children = self._branch(number)
            number = children[bisect_right(keys, key)]
        return self._leaves.get(number) or self._cached(self._leaves, number, self._leaf_at(number))

    def _branch(self, number: int) -> _BranchPage:
        return self._branches.get(number) or self._cached(self._branches, number, self._branch_at(number))

    def _cached(self, pages: dict[int, Cached], number: int, page: Cached) -> Cached:
        if len(pages) * self._pages.size >= CACHE_BYTES:
            pages.clear()
        pages[number] = page
        return page

    def _branch_at(self, number: int) -> _BranchPage:
        keys, children = zip(*self._pages.children(self._pages.branch(number)), strict=True)
        return _BranchPage(list(keys[1:]), list(children))

    def _leaf_at(self, number: int) -> _LeafPage:
        page = self._pages.leaf(number)
        *_, start, end = self._pages.node(page, 0)
        return _LeafPage(int.from_bytes(page.data[start:end], "big"), page)
