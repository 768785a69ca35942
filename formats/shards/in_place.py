"""Shards of images that stay in their archive, and the blocks in which an epoch reads any dataset.

Such a shard's file is a table of the images' places in the archive: .npy, one row per record. The archive is
``archive.tar`` in the table's folder, usually a link.

A block is a part of a dataset that an epoch reads sequentially; a shuffle takes blocks in random order. It is
a shard, or a small part of an archive, whose images are stored class by class: smaller blocks put more
classes into a shuffle window.
"""

from __future__ import annotations

import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.runtime.files import hash_descriptor, naming
from shardprep.formats.runtime.jobs import Unit
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    Addresses,
    Container,
    FileEntry,
    ShardFile,
    ShardWriter,
    StoredRecord,
    advice_for,
    not_indexed,
    place_of,
    published_file,
    table_header,
    write_table,
)

MOST_ARCHIVE_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of an archive that hold the images of a shard, and their ``sha256``, at first empty."""

    start: int
    stop: int
    sha256: str = ""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class IndexedArchive:
    """The archive of a dataset, as in the manifest.

    ``name`` is the file's name when it was indexed, for information only. ``regions`` are those of the shards
    in stored order, and together the whole archive. A block has about ``block_bytes`` bytes of images.
    """

    name: str
    regions: tuple[Region, ...]
    block_bytes: int

    @property
    def size(self) -> int:
        return self.regions[-1].stop

    def to_json(self) -> dict[str, Any]:
        listed = [{"size": region.size, "sha256": region.sha256} for region in self.regions]
        return {"name": self.name, "block_bytes": self.block_bytes, "regions": listed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> IndexedArchive:
        """Return the archive of a valid manifest."""
        stops = accumulate(each["size"] for each in value["regions"])
        regions = (
            Region(stop - each["size"], stop, each["sha256"])
            for stop, each in zip(stops, value["regions"], strict=True)
        )
        return cls(value["name"], tuple(regions), value["block_bytes"])

    def issue(self, dataset: Path) -> str:
        """Return what is wrong with the archive in a dataset's folder, or "". Raises OSError."""
        with suppress(FileNotFoundError):
            status = (dataset / ARCHIVE_NAME).stat()
            if stat.S_ISREG(status.st_mode) and status.st_size == self.size:
                return ""
        return f"is not there, or not a file of {self.size:,} bytes"

    def check(self, dataset: Path) -> None:
        """Raise ShardDamaged, naming the archive, if it has an :meth:`issue`; OSError."""
        if issue := self.issue(dataset):
            raise not_indexed(dataset / ARCHIVE_NAME, issue)


def changed_in(link: Path, region: Region) -> str:
    """Return the finding for a region whose bytes have changed."""
    return (
        f"the SHA-256 of bytes {region.start} to {region.stop} of {place_of(link)} differs from the "
        f"manifest; {advice_for(link)}"
    )


def is_linked(link: Path, archive: Path) -> bool:
    """Whether ``link`` leads to the archive, or is itself a file, which is never replaced."""
    return link.exists() and (not link.is_symlink() or link.samefile(archive))


def link_archive(link: Path, archive: Path, folder: Path) -> None:
    """Make ``link`` a link to the archive, atomically, by a rename from ``folder``; a file there stays."""
    if is_linked(link, archive):
        return
    made = folder / f"{link.name}.{secrets.token_hex(8)}"
    made.symlink_to(archive.resolve())
    made.replace(link)


def hash_region(archive: Path, region: Region) -> str:
    """Return ``sha256:<hex>`` of a region, cut at the end of the archive. Raises OSError."""
    with published_file(archive) as descriptor:
        return hash_descriptor(descriptor, region.start, region.stop)


def spanned(ends: Iterable[int], size: int) -> tuple[Region, ...]:
    """Return regions that end with each shard's last image, and the last one with the archive.

    >>> [(region.start, region.stop) for region in spanned([10, 30], 40)]
    [(0, 10), (10, 40)]
    """
    stops = [*ends]
    stops[-1:] = [size]
    return tuple(Region(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


MAX_TABLE_BYTES = 1 << 30  # of 20 million records
HEADER_BYTES = 256  # more than any table's header

_SHAPE = re.compile(rb"'key', '\|S([1-9]\d{0,3})'.*'shape': \((0|[1-9]\d{0,9}),\)")


def place_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Return a table's row dtype: the image's place in the archive, and the rest of its record."""
    fixed = [("offset", "<u8"), ("length", "<u4"), ("label", "<i4"), ("crc32c", "<u4")]
    return np.dtype([*fixed, ("key", f"S{max(1, key_bytes)}")])


def bytes_needed(unit: Unit) -> int:
    """Return an upper bound on the file's size."""
    return HEADER_BYTES + unit.records * place_dtype(unit.key_bytes).itemsize


class TarTableWriter(ShardWriter):
    """Writes a table when the context ends; does not look at the archive."""

    def __init__(self, path: Path, unit: Unit) -> None:
        self._file = path.open("xb")
        self._path = path
        self._rows = np.zeros(unit.records, place_dtype(unit.key_bytes))
        self._count = 0

    def append(self, stored: StoredRecord) -> None:
        key, label, crc32c, image, offset = stored
        self._rows[self._count] = (offset, len(image), label, crc32c, key)
        self._count += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with naming(self._path), self._file:
            if kind is None:
                write_table(self._file, self._rows[: self._count])


def addresses(path: Path, archive: ShardFile) -> Addresses:
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
    return rows[["key", "label", "crc32c", "offset", "length"]]


# No library: a table's bytes depend only on the records and their places.
CONTAINER = Container(write=TarTableWriter, addresses=addresses, bytes_needed=bytes_needed, library=dict)

BLOCK_BYTES = 4 << 20  # a disk that seeks in 10 ms and reads 150 MB/s spends a quarter of the time seeking
_OVERHEAD = 768  # of a tar member: its header, and padding to a multiple of 512 bytes


class Block(NamedTuple):
    """Consecutive records in one file, in ``size`` bytes from ``start``."""

    name: str
    start: int
    size: int
    records: int


def blocks_of(shards: Iterable[FileEntry]) -> tuple[Block, ...]:
    """Return one block for each shard."""
    return tuple(Block(shard.name, 0, shard.size, shard.records) for shard in shards)


def blocks_in(
    archive: IndexedArchive, counts: Sequence[int], lengths: npt.NDArray[np.uint32]
) -> tuple[Block, ...]:
    """Return the blocks of an archive: about ``block_bytes`` of images each, within one region.

    ``counts`` are the records of each region, ``lengths`` the images' sizes in bytes; the division depends on
    these alone. A block's start and size are estimates within its region, good enough for readahead.
    """
    blocks: list[Block] = []
    stops = np.cumsum(counts)
    for region, stop, count in zip(archive.regions, stops.tolist(), counts, strict=True):
        if count:
            inside = lengths[stop - count : stop].astype(np.int64)
            begins = np.cumsum(inside) - inside
            bounds = np.flatnonzero(np.diff(begins // archive.block_bytes, prepend=-1, append=-1))
            ends = np.append(0, np.cumsum(inside + _OVERHEAD))
            places = region.start + (ends[bounds] / ends[-1] * region.size).astype(np.int64)
            columns = (places[:-1].tolist(), np.diff(places).tolist(), np.diff(bounds).tolist())
            blocks += [Block(ARCHIVE_NAME, *block) for block in zip(*columns, strict=True)]
    return tuple(blocks)
