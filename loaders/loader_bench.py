"""All that is to be known of a loader's speed: the measurement, and what it is held against."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .against_disk import AgainstDisk
from .disk import DiskProfile
from .loader_speed import LoaderSpeed
from .measure import measure
from .probes import MakeLoader, Probes, probe
from .sweep import Sweep, sweep
from .transforms import Transform

PROBE = 0.25  # the share of the measurement's time that each probe has


@dataclass(frozen=True)
class LoaderBench:
    """``speed`` is that of the loader, with the fastest value of ``sweep``; None for what was not asked for."""

    speed: LoaderSpeed
    sweep: Sweep | None
    probes: Probes | None
    disk: AgainstDisk | None

    @property
    def sentence(self) -> str:
        """What limits."""
        return str(self.speed.stats)

    def to_json(self) -> dict[str, Any]:
        """A value of JSON types; docs/bench-loader.md lists the keys."""
        others = {"sweep": self.sweep, "probes": self.probes, "disk": self.disk}
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
) -> LoaderBench:
    """Measure for ``seconds`` the loader that is made, and again for each value of the ``swept`` option.

    ``explain`` adds probes of a quarter of that time each, where there is a verdict to try. ``trace`` names
    a file for a Chrome trace, after a sweep of one more run with the fastest value. A bar on stderr shows
    what is going on, if that is a terminal. Raises what the loader raises, and OSError.
    """
    tried = sweep(make, *swept, seconds=seconds, watched=True) if swept else None
    if tried:
        make = partial(make, **{tried.option: tried.fastest.value})
    if tried is None or trace:
        speed = measure(make, seconds=seconds, trace=trace, watched=True)
    else:
        speed = tried.fastest.speed
    return LoaderBench(
        speed=speed,
        sweep=tried,
        probes=probe(make, speed, transform, seconds=seconds * PROBE) if explain and speed.verdict else None,
        disk=AgainstDisk.of(speed, disk) if disk else None,
    )
