"""Shards of images that stay in their archive, and the blocks in which an epoch reads any dataset.

Such a shard's file is a table of the images' places in the archive: .npy, one row per record. The archive is
``archive.tar`` in the table's folder, usually a link.

A block is the part of a dataset that an epoch reads from beginning to end, blocks in random order where it
shuffles: a shard, or in an archive, where images lie class after class, a small part of one. The smaller the
blocks, the more classes a window of the same size has.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.runtime.files import OPEN_FLAGS, hash_descriptor, naming
from shardprep.formats.shards.files import ARCHIVE_NAME, FileEntry, ShardFile, table_header, write_table
from shardprep.formats.shards.read import (
    ColumnAddresses,
    Container,
    Extent,
    ShardWriter,
    StoredRecord,
    advice_for,
    not_indexed,
    place_of,
)

MOST_ARCHIVE_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes from ``start`` to ``stop`` of an archive, in which the images of one shard lie.

    ``sha256`` is their digest, empty before they are hashed.
    """

    start: int
    stop: int
    sha256: str = ""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class IndexedArchive:
    """The archive of a dataset, as the manifest has it.

    ``name`` is the file's name when it was indexed; nothing is found by it. ``regions`` are those of the
    shards, in stored order, which are the whole archive, one after the other. ``block_bytes`` is about the
    number of image bytes in a block, which an epoch reads from its beginning to its end.
    """

    name: str
    regions: tuple[Region, ...]
    block_bytes: int

    @property
    def size(self) -> int:
        """The archive's size in bytes."""
        return self.regions[-1].stop

    def to_json(self) -> dict[str, Any]:
        """Return the archive as the manifest has it."""
        listed = [{"size": region.size, "sha256": region.sha256} for region in self.regions]
        return {"name": self.name, "block_bytes": self.block_bytes, "regions": listed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> IndexedArchive:
        """Return the archive of a valid manifest; the inverse of :meth:`to_json`."""
        stops = accumulate(each["size"] for each in value["regions"])
        regions = (
            Region(stop - each["size"], stop, each["sha256"])
            for stop, each in zip(stops, value["regions"], strict=True)
        )
        return cls(value["name"], tuple(regions), value["block_bytes"])

    def issue(self, dataset: Path) -> str:
        """Say what is wrong with the archive of a dataset's folder, by its size; empty if nothing.

        Raises OSError.
        """
        link = dataset / ARCHIVE_NAME
        try:
            status = link.stat()
        except FileNotFoundError:
            return "is not there"
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        return f"has {status.st_size} bytes, not {self.size}" if status.st_size != self.size else ""

    def check(self, dataset: Path) -> None:
        """Raise ShardDamaged, which names the archive, where :meth:`issue` finds anything; OSError."""
        if issue := self.issue(dataset):
            raise not_indexed(dataset / ARCHIVE_NAME, issue)


def changed_in(link: Path, region: Region) -> str:
    """Return the finding for a region with other bytes than were indexed."""
    return (
        f"the SHA-256 of bytes {region.start} to {region.stop} of {place_of(link)} differs from the "
        f"manifest; {advice_for(link)}"
    )


def is_linked(link: Path, archive: Path) -> bool:
    """Whether ``link`` leads to the archive, or is itself a file, which no link replaces."""
    return link.exists() and (not link.is_symlink() or link.samefile(archive))


def link_archive(link: Path, archive: Path, folder: Path) -> None:
    """Make ``link`` a link to the archive, in place of another link, by a rename from ``folder``.

    A file in place of the link stays. Raises OSError.
    """
    if is_linked(link, archive):
        return
    made = folder / f"{link.name}.{secrets.token_hex(8)}"
    made.symlink_to(archive.resolve())
    made.replace(link)


def hash_region(archive: Path, region: Region) -> str:
    """Return ``sha256:<hex>`` of a region's bytes, fewer where the archive ends before. Raises OSError."""
    descriptor = os.open(archive, OPEN_FLAGS)
    try:
        with naming(archive):
            return hash_descriptor(descriptor, region.start, region.stop)
    finally:
        os.close(descriptor)


def spanned(ends: Iterable[int], size: int) -> tuple[Region, ...]:
    """Return regions that end where the last image of each shard does; the last one ends with the archive.

    >>> [(region.start, region.stop) for region in spanned([10, 30], 40)]
    [(0, 10), (10, 40)]
    """
    stops = [*ends]
    stops[-1:] = [size]
    return tuple(Region(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


MAX_TABLE_BYTES = 1 << 30  # of 20 million records
HEADER_BYTES = 256  # more than the header of any table has

_SHAPE = re.compile(rb"'key', '\|S([1-9]\d{0,3})'.*'shape': \((0|[1-9]\d{0,9}),\)")


def place_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Return the columns of a table: the place of an image in the archive, and its record without it."""
    return np.dtype(
        [
            ("offset", "<u8"),
            ("length", "<u4"),
            ("label", "<i4"),
            ("crc32c", "<u4"),
            ("key", f"S{max(1, key_bytes)}"),
        ]
    )


def bytes_needed(extent: Extent) -> int:
    """Return an upper bound of the file's size."""
    return HEADER_BYTES + extent.records * place_dtype(extent.key_bytes).itemsize


class TarTableWriter(ShardWriter):
    """Writer of a table. It writes the file when it is left, and does not look at the archive."""

    def __init__(self, path: Path, extent: Extent) -> None:
        self._file = path.open("xb")
        self._path = path
        self._rows = np.zeros(extent.records, place_dtype(extent.key_bytes))
        self._count = 0

    def append(self, stored: StoredRecord) -> None:
        key, label, crc32c, image, offset = stored
        self._rows[self._count] = (offset, len(image), label, crc32c, key)
        self._count += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with naming(self._path), self._file:
            if kind is None:
                write_table(self._file, self._rows[: self._count])


def addresses(path: Path, archive: ShardFile) -> ColumnAddresses:
    """Read a table into memory. Raises ShardDamaged, MemoryError, OSError."""
    with closing(ShardFile(path)) as file:
        data = file.read_at(file.size, 0) if 10 < file.size <= MAX_TABLE_BYTES else bytes(10)
    start = 10 + int.from_bytes(data[8:10], "little")
    shape = _SHAPE.search(data[:start])
    key_bytes, records = (int(number) for number in shape.groups()) if shape else (0, 0)
    row = place_dtype(key_bytes)
    is_table = 1 <= key_bytes <= MAX_KEY_BYTES and data[:start] == table_header(row, records)
    if not is_table or len(data) - start != records * row.itemsize:
        raise ShardDamaged("is not a table of images in an archive; prep repair rebuilds it", path=path)
    rows = np.frombuffer(data, row, records, start)
    return ColumnAddresses(*(rows[name] for name in ("key", "label", "crc32c", "offset", "length")))


def library() -> dict[str, str | int]:
    """Return nothing: the bytes of a table depend on the records and their places alone."""
    return {}


CONTAINER = Container(write=TarTableWriter, addresses=addresses, bytes_needed=bytes_needed, library=library)

BLOCK_BYTES = 4 << 20  # a disk that seeks in 10 ms and reads 150 MB/s spends a quarter of the time seeking
_OVERHEAD = 768  # of a member of a tar: its header, and padding to whole blocks of 512 bytes


class Block(NamedTuple):
    """Consecutive records of one file: its name, and the bytes from ``start`` on in which they lie."""

    name: str
    start: int
    size: int
    records: int


def blocks_of(shards: Iterable[FileEntry]) -> tuple[Block, ...]:
    """Return the blocks of shards: each is one."""
    return tuple(Block(shard.name, 0, shard.size, shard.records) for shard in shards)


def blocks_in(
    archive: IndexedArchive, counts: Sequence[int], lengths: npt.NDArray[np.uint32]
) -> tuple[Block, ...]:
    """Return the blocks of an archive: about ``block_bytes`` of images each, within one region.

    ``counts`` are the regions' numbers of records, ``lengths`` the images' lengths in bytes. The records of a
    block depend on these alone. Where a block begins is estimated within its region, as a table has the exact
    places: reading ahead needs no more.
    """
    blocks: list[Block] = []
    stops = np.cumsum(counts)
    for region, stop, count in zip(archive.regions, stops.tolist(), counts, strict=True):
        if count:
            inside = lengths[stop - count : stop].astype(np.int64)
            blocks += _divided(inside, region.start, region.stop, archive.block_bytes)
    return tuple(blocks)


def _divided(lengths: npt.NDArray[np.int64], start: int, stop: int, block_bytes: int) -> list[Block]:
    begins = np.cumsum(lengths) - lengths
    firsts = np.flatnonzero(np.diff(begins // block_bytes, prepend=-1))
    bounds = np.append(firsts, len(lengths))
    taken = np.append(0, np.cumsum(lengths + _OVERHEAD))
    places = start + (taken[bounds] / taken[-1] * (stop - start)).astype(np.int64)
    sizes, records = np.diff(places), np.diff(bounds)
    columns = (places[:-1].tolist(), sizes.tolist(), records.tolist())
    return [Block(ARCHIVE_NAME, *block) for block in zip(*columns, strict=True)]
