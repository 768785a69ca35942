"""The archive that a dataset was indexed in: its images stay there, and tables have their places."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardprep.formats.errors import ShardDamaged
from shardprep.formats.system.atomic_write import hash_descriptor
from shardprep.formats.system.regular_file import OPEN_FLAGS, naming

ARCHIVE_NAME = "archive.tar"  # in the dataset's folder: a link to the archive, or the archive itself
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

    ``name`` is the file's name when it was indexed; nothing is found by it. ``sizes`` and ``sha256`` are
    those of the shards' regions, in stored order, which are the whole archive, one after the other.
    ``block_bytes`` is about the number of image bytes in a block, which an epoch reads from its beginning to
    its end.
    """

    name: str
    sizes: tuple[int, ...]
    sha256: tuple[str, ...]
    block_bytes: int

    @property
    def size(self) -> int:
        """The archive's size in bytes."""
        return sum(self.sizes)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The region of each shard."""
        stops = tuple(accumulate(self.sizes))
        parts = zip(self.sizes, stops, self.sha256, strict=True)
        return tuple(Region(stop - size, stop, sha256) for size, stop, sha256 in parts)

    def to_json(self) -> dict[str, Any]:
        """Return the archive as the manifest has it."""
        regions = zip(self.sizes, self.sha256, strict=True)
        listed = [{"size": size, "sha256": sha256} for size, sha256 in regions]
        return {"name": self.name, "block_bytes": self.block_bytes, "regions": listed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> IndexedArchive:
        """Return the archive of a valid manifest; the inverse of :meth:`to_json`."""
        regions = value["regions"]
        sizes, digests = (tuple(region[name] for region in regions) for name in ("size", "sha256"))
        return cls(value["name"], sizes, digests, value["block_bytes"])

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


def place_of(link: Path) -> str:
    """Return the path of the archive that a dataset's link leads to, whether it is there or not."""
    return os.path.realpath(link)


def advice_for(link: Path) -> str:
    """Return what to do about an archive that is not the one that was indexed."""
    return (
        f"let {link} be, or be a link to, the archive that was indexed, or index what is there with prep index "
        "into another folder"
    )


def not_indexed(link: Path, issue: str) -> ShardDamaged:
    """Return the error for an archive that is not the one that was indexed; it names the archive."""
    return ShardDamaged(f"{issue}; {advice_for(link)}", path=place_of(link))


def changed_in(link: Path, region: Region) -> str:
    """Return the finding for a region with other bytes than were indexed."""
    return (
        f"the SHA-256 of bytes {region.start} to {region.stop} of {place_of(link)} is not the manifest's; "
        f"{advice_for(link)}"
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
