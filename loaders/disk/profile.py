"""What was found out about a disk: rates with their spread, and how each was had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import numpy as np

FORMAT = "shardprep disk profile"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """Bytes per second: the median over ``repetitions`` passes, and the quartiles ``low`` and ``high``.

    ``method`` says in words how the bytes were read or written. Raises ValueError for what cannot be.
    """

    median: float
    low: float
    high: float
    repetitions: int
    method: str

    def __post_init__(self) -> None:
        rates = (self.low, self.median, self.high)
        if not (0 <= self.low <= self.median <= self.high and all(map(math.isfinite, rates))):
            raise ValueError(f"rates of {rates}")
        if self.repetitions < 1:
            raise ValueError(f"{self.repetitions} repetitions")

    @classmethod
    def of(cls, rates: Sequence[float], method: str) -> Measurement | None:
        """Of the rates that were measured, None where there are none."""
        if not rates:
            return None
        low, median, high = np.percentile(rates, (25, 50, 75)).tolist()
        return cls(median, low, high, len(rates), method)


@dataclass(frozen=True, slots=True)
class Reads:
    """The same bytes read cold and from memory; None where that could not be had."""

    cold: Measurement | None
    warm: Measurement | None


@dataclass(frozen=True, slots=True)
class BlockReads(Reads):
    """Sequential reads in blocks of so many bytes."""

    block_bytes: int

    @property
    def block_name(self) -> str:
        """Such as "64 KiB" or "4 MiB"."""
        mebibytes, rest = divmod(self.block_bytes, 1 << 20)
        return f"{self.block_bytes >> 10} KiB" if rest else f"{mebibytes} MiB"


@dataclass(frozen=True, slots=True)
class DepthReads(Reads):
    """Random reads of so many bytes each (a record, rounded up to pages), so many at once."""

    queue_depth: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class SmallFileReads:
    """``count`` files of ``file_bytes`` each, against one ``shard`` of the same bytes."""

    count: int
    file_bytes: int
    files: Reads
    shard: Reads


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there are no rates, None where there are."""

    cold: str | None
    small_files: str | None
    writing: str | None


@dataclass(frozen=True)
class DiskProfile:
    """A measured disk. Immutable, picklable, comparable; ``from_json(p.to_json()) == p``.

    ``kind`` is what ``path`` was: "file", "folder" or "dataset", of ``files`` files that were read with
    ``bytes`` bytes. ``record_bytes`` is the mean size of a record, or what was taken for it. ``seconds``
    is how long it took. ``cold_method`` is "posix_fadvise" (pages dropped, mincore(2) confirming it),
    "O_DIRECT", or None with the reason in ``missing.cold``. ``stream`` is the loader's pattern: forward in
    large pieces that are asked for ahead. ``remarks`` are sentences for the reader.
    """

    path: str
    kind: str
    filesystem: str
    files: int
    bytes: int
    record_bytes: int
    seconds: float
    cold_method: str | None
    stream: Reads
    sequential: tuple[BlockReads, ...]
    random: tuple[DepthReads, ...]
    small_files: SmallFileReads | None
    writing: Measurement | None
    missing: Missing
    remarks: tuple[str, ...] = ()

    @property
    def images_per_second(self) -> dict[str, float | None]:
        """What this disk feeds at most, "cold" and "warm", by the loader's pattern."""
        return {name: _over(_rate(self.stream, name), self.record_bytes) for name in ("cold", "warm")}

    @property
    def sequential_over_random(self) -> dict[str, float | None]:
        """How many times faster the loader's pattern is than random reads, one at a time."""
        return {
            name: _over(_rate(self.stream, name), _rate(self.random[0], name)) for name in ("cold", "warm")
        }

    def to_json(self) -> dict[str, Any]:
        """A value of JSON types, with what follows from it; docs/bench-disk.md lists the keys."""
        derived = {
            "images_per_second": self.images_per_second,
            "sequential_over_random": self.sequential_over_random,
        }
        lists = {name: list(map(asdict, getattr(self, name))) for name in ("sequential", "random")}
        return (
            {"format": FORMAT, "version": VERSION}
            | asdict(self)
            | lists
            | derived
            | {"remarks": list(self.remarks)}
        )

    @classmethod
    def from_json(cls, value: Any) -> DiskProfile:
        """The profile that has this JSON. Raises DataError for another one, UnknownVersion for a later one."""
        from .profile_file import parsed

        return parsed(value)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file, whole or not at all, over what was there. Raises OSError."""
        from .profile_file import save

        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> DiskProfile:
        """Read a file. Raises DataError where it holds no profile, UnknownVersion, OSError."""
        from .profile_file import load

        return load(path)


def _rate(reads: Reads, name: str) -> float | None:
    found: Measurement | None = getattr(reads, name)
    return found.median if found else None


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate is not None and other else None
