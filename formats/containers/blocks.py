"""The blocks of a dataset: what an epoch reads from beginning to end, in random order where it shuffles.

A block is a shard. In an archive, where images lie class after class, it is a small part of one: the smaller
the blocks, the more classes a window of the same size has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .archive import ARCHIVE_NAME, IndexedArchive
from .published_file import FileEntry

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
