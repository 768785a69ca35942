"""The benchmark of a loader: its speed, a sweep of an option, probes, and a comparison with the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from shardprep.loaders.order.shuffle_quality import ShuffleQuality
from shardprep.loaders.transforms.contract import Transform

from .disk import DiskProfile
from .loader_speed import LoaderSpeed, measure
from .probes import MakeLoader, Probes, probe

DISK_BOUND_SHARE = (
    0.7  # the least share of the disk's rate at which a loader that reads is limited by the disk
)

PROBE_SHARE = 0.25  # the time of each probe as a share of the measurement's


@dataclass(frozen=True)
class SweepRun:
    """The loader's speed at one value of an option."""

    value: int
    speed: LoaderSpeed


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in the order of the values; ``option`` is a parameter of the loader."""

    option: str
    runs: tuple[SweepRun, ...]

    @property
    def fastest(self) -> SweepRun:
        return max(self.runs, key=lambda run: run.speed.images_per_second)

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types: the main figures of each run."""
        return {
            "option": self.option,
            "fastest": self.fastest.value,
            "runs": [{"value": run.value, **_figures(run.speed)} for run in self.runs],
        }


def _figures(speed: LoaderSpeed) -> dict[str, Any]:
    names = ("images_per_second", "bytes_per_second", "gap_p50", "gap_p99", "cpu", "starved")
    return {name: getattr(speed, name) for name in names} | {
        "verdict": speed.verdict.to_dict() if speed.verdict else None
    }


def sweep(
    make: MakeLoader, option: str, values: Sequence[int], *, seconds: float, watched: bool = False
) -> Sweep:
    """Measure for ``seconds`` at each value. Raises what the loader raises."""
    runs = [
        SweepRun(value, measure(partial(make, **{option: value}), seconds=seconds, watched=watched))
        for value in values
    ]
    return Sweep(option, tuple(runs))


@dataclass(frozen=True)
class AgainstDisk:
    """Bytes per second that the loader ``delivered``, and that the disk reads in the loader's pattern.

    ``cold`` and ``warm`` are None where not measured. ``limit`` is the stage that limited the loader, or ""
    where that is unknown.
    """

    delivered: float
    cold: float | None
    warm: float | None
    limit: str

    @classmethod
    def of(cls, speed: LoaderSpeed, disk: DiskProfile) -> AgainstDisk:
        cold, warm = (found.median if found else None for found in (disk.stream.cold, disk.stream.warm))
        return cls(speed.bytes_per_second, cold, warm, speed.verdict.limit if speed.verdict else "")

    @property
    def sentence(self) -> str:
        """Whether the disk limits, as a sentence."""
        delivered = f"{self.delivered / 1e6:,.0f} MB/s"
        if self.cold is None:
            return f"The loader delivers {delivered}; the rate of cold reads from this disk is not known."
        reads = f"this disk reads {self.cold / 1e6:,.0f} MB/s cold"
        if not self.limit:
            return f"The loader delivers {delivered}, what limits it is not known; {reads}."
        if self.limit != "read":
            enough = "which is enough" if self.cold > self.delivered else "which would limit a cold epoch"
            return f"Not disk-bound: the loader delivers {delivered}; {reads}, {enough}."
        if self.delivered < DISK_BOUND_SHARE * self.cold:
            return f"Reading limits at {delivered}, but {reads}: other programs use it, or more workers would help."
        return f"Disk-bound at {delivered}; {reads}."

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        return asdict(self) | {"sentence": self.sentence}


@dataclass(frozen=True)
class LoaderBench:
    """The ``speed`` of a loader, with the fastest value of ``sweep``; None for parts not measured.

    ``shuffle_quality`` is that of the first epoch.
    """

    speed: LoaderSpeed
    sweep: Sweep | None
    probes: Probes | None
    disk: AgainstDisk | None
    shuffle_quality: ShuffleQuality | None = None

    @property
    def sentence(self) -> str:
        """The stage that limits, or that the run was too short to tell, as a sentence."""
        return self.speed.sentence

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types; docs/reference/bench-loader.md lists the keys."""
        others = {
            "sweep": self.sweep,
            "probes": self.probes,
            "disk": self.disk,
            "shuffle_quality": self.shuffle_quality,
        }
        return self.speed.to_json() | {
            name: part.to_json() if part else None for name, part in others.items()
        }


def bench(
    make: MakeLoader,
    transform: Transform | None,
    *,
    seconds: float,
    swept: tuple[str, Sequence[int]] | None = None,
    explain: bool = False,
    trace: str | os.PathLike[str] | None = None,
    disk: DiskProfile | None = None,
    watched: bool = True,
    mixing: bool = False,
) -> LoaderBench:
    """Measure the loader that ``make`` makes for ``seconds``, or for each value of the ``swept`` option.

    ``explain`` adds probes of a quarter of that time each, if there is a verdict to check; after too short a
    run there is none. ``trace`` names a file for a Chrome trace; after a sweep it is of one more run with the
    fastest value. ``watched`` shows the progress in a bar on a terminal or in a notebook. ``mixing`` adds the
    quality of the shuffle. Raises what the loader raises, and OSError.
    """
    tried = sweep(make, *swept, seconds=seconds, watched=watched) if swept else None
    if tried:
        make = partial(make, **{tried.option: tried.fastest.value})
    if tried is None or trace:
        speed = measure(make, seconds=seconds, trace=trace, watched=watched)
    else:
        speed = tried.fastest.speed
    return LoaderBench(
        speed=speed,
        sweep=tried,
        probes=probe(make, speed, transform, seconds=seconds * PROBE_SHARE)
        if explain and speed.verdict
        else None,
        disk=AgainstDisk.of(speed, disk) if disk else None,
        shuffle_quality=_shuffle_quality(make) if mixing else None,
    )


def _shuffle_quality(make: MakeLoader) -> ShuffleQuality:
    with make(workers=0) as loader:
        return loader.shuffle_quality()
