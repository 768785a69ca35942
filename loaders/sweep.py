"""The same loader with one option at several values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .loader_speed import LoaderSpeed
from .measure import measure
from .probes import MakeLoader


@dataclass(frozen=True)
class SweepRun:
    """What the loader did at this value."""

    value: int
    speed: LoaderSpeed


@dataclass(frozen=True)
class Sweep:
    """One run or more, in the order of the values; ``option`` is a parameter of the loader."""

    option: str
    runs: tuple[SweepRun, ...]

    @property
    def fastest(self) -> SweepRun:
        return max(self.runs, key=lambda run: run.speed.images_per_second)

    def to_json(self) -> dict[str, Any]:
        """A value of JSON types: the figures that differ; those of the fastest run are told in full elsewhere."""
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
    """Measure for ``seconds`` at each value. What the loader raises, this raises."""
    runs = [
        SweepRun(value, measure(partial(make, **{option: value}), seconds=seconds, watched=watched))
        for value in values
    ]
    return Sweep(option, tuple(runs))
