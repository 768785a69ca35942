"""The profile of a disk: rates with their spread, how each was measured, and bars of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.images.opencv import cv2
from shardprep.formats.runtime.files import save_bytes, user_path
from shardprep.formats.sources.listing import read_small_file
from shardprep.loaders.loader.json_parts import built_fields, naming_file

FORMAT = "shardprep disk profile"
VERSION = 1

LARGEST = 1 << 20
ADVICE = "measure again with prep bench-disk --save"


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
    record, or the size used instead. ``seconds`` is how long the measurement took. ``cold_method`` is
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
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("sequential", "random", "remarks"):
            values[name] = list(values[name])
        for name in ("images_per_second", "sequential_over_random"):
            values[name] = getattr(self, name)
        return values

    @classmethod
    def from_json(cls, value: Any) -> DiskProfile:
        """Return the profile that has this JSON: nothing is missing, unknown or changed.

        Raises DataError for other values, UnknownVersion.
        """
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise DataError(f"is not a disk profile; {ADVICE}")
        if value.get("version") != VERSION:
            raise UnknownVersion(
                f"profile version {value.get('version')}; this release knows {VERSION}; {ADVICE}"
            )
        try:
            profile = cls(**built_fields(cls, value))
            same = json.dumps(profile.to_json(), sort_keys=True) == json.dumps(value, sort_keys=True)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"is a damaged disk profile ({type(error).__name__}: {error}); {ADVICE}"
            ) from error
        if not same:
            raise DataError(f"is a damaged disk profile: its parts are inconsistent; {ADVICE}")
        return profile

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file atomically, replacing an existing one. Raises OSError."""
        data = json.dumps(self.to_json(), indent=2) + "\n"
        save_bytes(user_path(path), data.encode("ascii"), mode=0o644)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> DiskProfile:
        """Read a file. Raises DataError where it holds no profile, UnknownVersion, OSError."""
        path = user_path(path)
        try:
            value = json.loads(read_small_file(path, LARGEST))
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not a disk profile: it is not JSON; {ADVICE}", path=path) from error
        with naming_file(path):
            return cls.from_json(value)


def _rate(reads: Reads, name: str) -> float | None:
    found: Measurement | None = getattr(reads, name)
    return found.median if found else None


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate is not None and other else None


WIDTH, LEFT, RIGHT, ROW, MARGIN = 900, 300, 150, 26, 20  # pixels
BLACK, GRAY = (30, 30, 30), (90, 90, 90)
COLOURS = {"cold": (170, 110, 40), "warm": (40, 130, 230)}  # blue and orange, in OpenCV's order


class Bar(NamedTuple):
    """One rate in bytes per second; ``state`` is "cold" or "warm"."""

    label: str
    state: str
    rate: float

    @property
    def text(self) -> str:
        return f"{self.rate / 1e6:,.0f} MB/s"


def bars(profile: DiskProfile) -> list[Bar]:
    """Return the bars of sequential, random and small-file reads that were measured, cold before warm."""
    rows: list[tuple[str, Reads]] = [("loader's pattern", profile.stream)]
    rows += [(f"sequential, {r.block_name}", r) for r in profile.sequential]
    rows += [(f"random, {r.queue_depth} at once", r) for r in profile.random]
    if profile.small_files:
        rows += [("small files", profile.small_files.files)]
    return [
        Bar(label, state, rate)
        for state in ("cold", "warm")
        for label, reads in rows
        if (rate := _rate(reads, state)) is not None
    ]


def terminal_lines(rows: Sequence[Bar], *, width: int = 40, mark: str = "█") -> list[str]:
    """Return a line of text for each bar; cold and warm have separate scales."""
    left = max((len(row.label) for row in rows), default=0)
    longest = {row.state: max(r.rate for r in rows if r.state == row.state) for row in rows}
    return [
        f"{row.state}  {row.label:<{left}}  {mark * max(1, round(width * row.rate / longest[row.state]))} {row.text}"
        for row in rows
    ]


def save_picture(profile: DiskProfile, path: str | PathLike[str]) -> None:
    """Write the bars as a PNG. Raises OSError; UsageError where the name does not end in .png."""
    path = user_path(path)
    if path.suffix.lower() != ".png":
        raise UsageError("must be a picture: give it a name that ends in .png", path=path)
    _, data = cv2.imencode(".png", picture(profile))
    path.write_bytes(data.tobytes())


def picture(profile: DiskProfile) -> npt.NDArray[np.uint8]:
    """Return the bars as pixels, uint8 [height, 900, 3] in BGR; cold and warm have separate scales."""
    rows = bars(profile)
    states = list(dict.fromkeys(row.state for row in rows))
    canvas = np.full((2 * MARGIN + ROW * (len(rows) + 2 * len(states) + 1), WIDTH, 3), 255, np.uint8)
    y = MARGIN + ROW
    _write(canvas, f"{profile.kind} on {profile.filesystem or 'this disk'}", MARGIN, y, BLACK)
    for state in states:
        of_state = [row for row in rows if row.state == state]
        y += 2 * ROW
        _write(canvas, state, MARGIN, y, COLOURS[state])
        longest = max(row.rate for row in of_state)
        for row in of_state:
            y += ROW
            end = LEFT + max(1, round((WIDTH - LEFT - RIGHT) * row.rate / max(longest, 1e-9)))
            cv2.rectangle(canvas, (LEFT, y - 14), (end, y + 4), COLOURS[state], cv2.FILLED)
            _write(canvas, row.label, MARGIN, y, GRAY)
            _write(canvas, row.text, end + 8, y, BLACK)
    return canvas


def _write(canvas: npt.NDArray[np.uint8], text: str, x: int, y: int, colour: tuple[int, int, int]) -> None:
    ascii_text = text.encode("ascii", "replace").decode()  # the characters of OpenCV's fonts
    cv2.putText(canvas, ascii_text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1, cv2.LINE_AA)
