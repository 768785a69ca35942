"""The profile of a disk: rates with their spread, and how each was measured."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.errors import DataError, UnknownVersion
from shardprep.formats.sources.listing.text_file import read_small_file
from shardprep.formats.system.user_path import user_path

FORMAT = "shardprep disk profile"
VERSION = 1


LARGEST = 1 << 20
ADVICE = "measure again with prep bench-disk --save"
FIELDS: dict[str, Any] = {
    "path": str,
    "kind": str,
    "filesystem": str,
    "files": int,
    "bytes": int,
    "record_bytes": int,
    "seconds": float,
    "cold_method": str | None,
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """A rate in bytes per second.

    ``median`` is over ``repetitions`` passes, ``low`` and ``high`` are the quartiles. ``method`` describes
    how the bytes were read or written. Raises ValueError for values that are not finite, negative or out of
    order.
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
        """Return the measurement of these rates; None where there are none."""
        if not rates:
            return None
        low, median, high = np.percentile(rates, (25, 50, 75)).tolist()
        return cls(median, low, high, len(rates), method)


@dataclass(frozen=True, slots=True)
class Reads:
    """Rates of the same bytes read ``cold`` and ``warm``, from memory; None where not measured."""

    cold: Measurement | None
    warm: Measurement | None


@dataclass(frozen=True, slots=True)
class BlockReads(Reads):
    """Sequential reads in blocks of ``block_bytes``, ``cold`` and ``warm``."""

    block_bytes: int

    @property
    def block_name(self) -> str:
        """The size of a block as text, such as "64 KiB" or "4 MiB"."""
        mebibytes, rest = divmod(self.block_bytes, 1 << 20)
        return f"{self.block_bytes >> 10} KiB" if rest else f"{mebibytes} MiB"


@dataclass(frozen=True, slots=True)
class DepthReads(Reads):
    """Random reads of ``block_bytes`` each (a record, rounded up to pages), ``queue_depth`` at once."""

    queue_depth: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class SmallFileReads:
    """Reads of ``count`` ``files`` of ``file_bytes`` each, and of one ``shard`` of the same bytes."""

    count: int
    file_bytes: int
    files: Reads
    shard: Reads


@dataclass(frozen=True, slots=True)
class Missing:
    """The reasons for missing rates, None where there are rates.

    ``cold`` is for cold reads, ``small_files`` for the comparison with a shard, ``writing`` for writes.
    """

    cold: str | None
    small_files: str | None
    writing: str | None


@dataclass(frozen=True)
class DiskProfile:
    """The profile of a disk. Immutable, picklable, comparable; ``from_json(p.to_json()) == p``.

    ``kind`` is what ``path`` was: "file", "folder" or "dataset"; ``filesystem`` is the type of its file
    system. ``files`` files of ``bytes`` bytes together were read. ``record_bytes`` is the mean size of a
    record, or what was used as such. ``seconds`` is how long the measurement took. ``cold_method`` is
    "posix_fadvise" (pages dropped, confirmed by mincore(2)), "O_DIRECT", or None with the reason in
    ``missing.cold``. ``stream`` is the loader's pattern: forward in large pieces that are requested ahead.
    ``sequential`` has one entry per block size, ``random`` one per number of reads at once. ``small_files``
    compares many files with one, ``writing`` is the rate of writes with fsync; None where not measured, with
    the reason in ``missing``. ``remarks`` are sentences for the reader.
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

    def __repr__(self) -> str:
        rates = [(name, _rate(self.stream, name)) for name in ("cold", "warm")]
        known = ", ".join(f"{rate / 1e6:,.0f} MB/s {name}" for name, rate in rates if rate is not None)
        return f"<DiskProfile of {self.path!r} ({self.filesystem}): {known or 'no rates'}>"

    @property
    def images_per_second(self) -> dict[str, float | None]:
        """The greatest number of images/s of this disk in the loader's pattern, "cold" and "warm"."""
        return {name: _over(_rate(self.stream, name), self.record_bytes) for name in ("cold", "warm")}

    @property
    def sequential_over_random(self) -> dict[str, float | None]:
        """How many times as fast the loader's pattern is as random reads, one at a time."""
        return {
            name: _over(_rate(self.stream, name), _rate(self.random[0], name)) for name in ("cold", "warm")
        }

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types, with derived values; docs/reference/bench-disk.md lists the keys."""
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
        """Return the profile that has this JSON. Raises DataError for other values, UnknownVersion."""
        return parsed(value)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file atomically, replacing an existing one. Raises OSError."""
        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> DiskProfile:
        """Read a file. Raises DataError where it holds no profile, UnknownVersion, OSError."""
        return load(path)


def _rate(reads: Reads, name: str) -> float | None:
    found: Measurement | None = getattr(reads, name)
    return found.median if found else None


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate is not None and other else None


def save(profile: DiskProfile, path: str | os.PathLike[str]) -> None:
    """Write a temporary file and rename it, so that no reader finds an incomplete one."""
    final = user_path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{final.name}.", dir=final.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(json.dumps(profile.to_json(), indent=2) + "\n")
            os.fchmod(file.fileno(), 0o644)
        Path(name).replace(final)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> DiskProfile:
    """Read the profile of a file; errors name the file."""
    path = user_path(path)
    try:
        return parsed(json.loads(read_small_file(path, LARGEST)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not a disk profile: it is not JSON; {ADVICE}", path=path) from error
    except (DataError, UnknownVersion) as error:
        raise type(error)(error.message, path=path) from error


def parsed(value: Any) -> DiskProfile:
    """Return the profile only if it has exactly this JSON: nothing is missing, unknown or changed."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"is not a disk profile; {ADVICE}")
    if value.get("version") != VERSION:
        raise UnknownVersion(
            f"profile version {value.get('version')}; this release knows {VERSION}; {ADVICE}"
        )
    try:
        profile = _profile(value)
        same = json.dumps(profile.to_json(), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"is a damaged disk profile ({type(error).__name__}: {error}); {ADVICE}") from error
    if not same:
        raise DataError(f"is a damaged disk profile: its parts are inconsistent; {ADVICE}")
    return profile


def _profile(value: dict[str, Any]) -> DiskProfile:
    small = value["small_files"]
    return DiskProfile(
        **{name: _typed(value[name], kind) for name, kind in FIELDS.items()},
        stream=_reads(value["stream"]),
        sequential=tuple(_blocks(each) for each in value["sequential"]),
        random=tuple(_depths(each) for each in value["random"]),
        small_files=None if small is None else _small_files(small),
        writing=_measurement(value["writing"]),
        missing=Missing(**{k: _typed(v, str | None) for k, v in value["missing"].items()}),
        remarks=tuple(_typed(remark, str) for remark in value["remarks"]),
    )


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r} has the wrong type")
    return value


def _measurement(value: Any) -> Measurement | None:
    if value is None:
        return None
    kinds = {"median": float, "low": float, "high": float, "repetitions": int, "method": str}
    return Measurement(**{name: _typed(value[name], kind) for name, kind in kinds.items()})


def _reads(value: Any) -> Reads:
    return Reads(_measurement(value["cold"]), _measurement(value["warm"]))


def _blocks(value: Any) -> BlockReads:
    reads = _reads(value)
    return BlockReads(reads.cold, reads.warm, _typed(value["block_bytes"], int))


def _depths(value: Any) -> DepthReads:
    reads = _reads(value)
    depth, size = (_typed(value[name], int) for name in ("queue_depth", "block_bytes"))
    return DepthReads(reads.cold, reads.warm, depth, size)


def _small_files(value: Any) -> SmallFileReads:
    count, size = (_typed(value[name], int) for name in ("count", "file_bytes"))
    return SmallFileReads(count, size, _reads(value["files"]), _reads(value["shard"]))
