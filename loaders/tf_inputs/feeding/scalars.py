"""The figures of an input's stats that are drawn over the course of a training."""

from __future__ import annotations

from collections.abc import Iterator

from shardprep.loaders.loader.bottleneck import StageLoad

from .stats import InputStats


def occupancy_of(stats: InputStats) -> dict[str, float]:
    """Return how full the input was, and the shares of steps and batches that found it empty and full."""
    return {"level": stats.mean_level, "starved": stats.starved, "blocked": stats.blocked}


def scalars_of(stats: InputStats) -> dict[str, float]:
    """Return the occupancy, the rate as ``images_per_second`` or ``batches_per_second``, and the stages.

    ``stage/<name>`` is the share of the time in which a stage works: those of the Loader, and each input's.
    Without a second batch, rate and stages are left out.
    """
    verdict = stats.verdict
    rate = {f"{verdict.unit}_per_second": verdict.rate} if verdict else {}
    stages = {f"stage/{load.name.replace(' ', '_')}": load.utilisation for load in _loads(stats)}
    return occupancy_of(stats) | rate | stages


def _loads(stats: InputStats) -> Iterator[StageLoad]:
    """The stages from the Loader's on; the last of these is the input's fetching, which is not its own."""
    if stats.source is not None:
        yield from _loads(stats.source)
    elif stats.loader is not None:
        yield from stats.loader.loads[:-1]
    if stats.load is not None:
        yield stats.load
