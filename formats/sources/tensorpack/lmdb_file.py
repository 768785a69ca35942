"""The records of an LMDB file, found by reading its pages. The file is neither mapped nor locked.

A value is a place in the file, which is read like that of any archive.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardprep.formats.containers.lmdb_pages import HEADER, MAGIC, LmdbPages
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.system.regular_file import ArchiveFile, naming

from .value import Value


def is_lmdb(path: Path) -> bool:
    """Whether a regular file begins like an LMDB file. Raises OSError."""
    if not path.is_file():
        return False
    with naming(path), path.open("rb") as file:
        return file.read(HEADER.size + 4)[HEADER.size :] == MAGIC.to_bytes(4, "little")


class LmdbRecords:
    """The keys of an open file in their order, each with its value. Iterable once.

    Raises SourceDamaged if the file is truncated or damaged, and for named databases and duplicate keys.
    """

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        self._pages = LmdbPages(file.read_at, file.end, self._damaged)
        self._meta = self._pages.meta
        self._pages_left = file.end // self._pages.size

    @property
    def entries(self) -> int:
        """The number of records that the file claims."""
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

    def _below(self, number: int, depth: int) -> Iterator[tuple[bytes, Value]]:
        """Yield the records of the subtree of ``depth`` levels that begins with this page."""
        if depth > 1:
            for child in self._children(number):
                yield from self._below(child, depth - 1)
        elif depth == 1:
            yield from self._records(number)

    def _children(self, number: int) -> Iterator[int]:
        self._count_page()
        return (child for _, child in self._pages.children(self._pages.branch(number)))

    def _records(self, number: int) -> Iterator[tuple[bytes, Value]]:
        self._count_page()
        page = self._pages.leaf(number)
        for node in self._pages.nodes(page):
            start, length, _ = self._pages.value(page, node)
            *_, key_start, key_end = node
            yield page.data[key_start:key_end], Value(self._file.read_at, start, length)

    def _count_page(self) -> None:
        self._pages_left -= 1
        if self._pages_left < 0:
            raise self._damaged("its pages form a cycle")

    def _damaged(self, reason: str) -> SourceDamaged:
        return SourceDamaged(f"the LMDB is damaged: {reason}; copy it again", path=self._file.path)
