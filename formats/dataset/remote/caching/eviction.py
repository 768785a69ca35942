"""Which file of a cache goes first: one that is not used again, else the one that is used last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry


def hex_of(entry: FileEntry) -> str:
    """Return the SHA-256 of a file as hexadecimal digits: its name in a cache."""
    return entry.sha256.removeprefix("sha256:")


def identity_of(name: str) -> int:
    """Return the number that stands for a file in the sequences of readers: the first 8 bytes of its SHA-256.

    >>> identity_of("00000000000000ff" + 48 * "0")
    255
    """
    return int(name[:16], 16)


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A whole file of a cache: its SHA-256 as ``name``, its size in bytes, and when it was used last."""

    name: str
    path: Path
    size: int
    used_ns: int


def eviction_order(files: Iterable[CachedFile], distances: Mapping[int, float]) -> list[CachedFile]:
    """Return files in the order in which they are evicted.

    ``distances`` are the numbers of uses before a file is used again, by :func:`identity_of`. Files without
    one come first, the least recently used of them before the others; then those with the largest.
    """
    return sorted(
        files, key=lambda file: (-distances.get(identity_of(file.name), math.inf), file.used_ns, file.name)
    )
