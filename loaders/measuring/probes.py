"""Short runs in which a part of a loader's work is left out, to measure what that part takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from shardprep.loaders.loader.loader import DEFAULT_SLOTS, Loader
from shardprep.loaders.transforms.contract import Transform

from .ceilings import hand_over_rate, one_core_rate
from .loader_speed import LoaderSpeed, measure

SECONDS = 2.0
FASTER = 1.25  # the least ratio of rates that counts as faster
EXPECTED_FASTER, EXPECTED_EQUAL = 1.5, 1.1  # expected ratios that a probe confirms; those between it does not
IN_MEMORY = 0.9  # the least share of shards in the page cache with which their storage is not read
TRANSFORM_STAGES = ("decode", "augment")
TRANSPORT_STAGES = ("transport", "hand-over")


class MakeLoader(Protocol):
    """A function that makes a loader, such as ``functools.partial(Loader, path, …)``."""

    def __call__(self, **options: Any) -> Loader: ...


@dataclass(frozen=True)
class Probe:
    """The result of one run: its rate, a ``sentence``, and whether it confirms the verdict.

    ``name`` is "encoded" (nothing is decoded), "again" (the same once more, from the page cache), "one core"
    (records in memory are transformed by one thread) or "hand-over" (nothing is read or written).
    ``confirms`` is None where the run says nothing about the stage that limits.
    """

    name: str
    images_per_second: float
    sentence: str
    confirms: bool | None


@dataclass(frozen=True)
class Probes:
    """All runs, and the stage that limits according to the verdict."""

    limit: str
    runs: tuple[Probe, ...]

    @property
    def confirmed(self) -> bool | None:
        """Whether every run that says something about the limit confirms it; None where none does."""
        results = [run.confirms for run in self.runs if run.confirms is not None]
        return all(results) if results else None

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        return {"limit": self.limit, "confirmed": self.confirmed, "runs": list(map(asdict, self.runs))}


def probe(
    make: MakeLoader, speed: LoaderSpeed, transform: Transform | None, *, seconds: float = SECONDS
) -> Probes:
    """Check the verdict of ``speed`` in a few runs of ``seconds`` each.

    ``make`` must make the loader that was measured, with ``transform``, and another one if it is given
    options. The consumer does nothing in any of them. Raises what a loader raises.
    """
    found = _Measured(speed)
    runs = [found.hand_over(_hand_over(make, speed, seconds))]
    if transform is not None:
        first, second = (measure(partial(make, transform=None), seconds=seconds) for _ in range(2))
        runs += [
            _unless_too_short(found.encoded(first.images_per_second), first),
            _unless_too_short(found.again(first, second), first, second),
        ]
        with make(workers=0) as loader:
            core = one_core_rate(loader.dataset, transform, seconds=seconds)
        runs.append(found.one_core(core))
    else:
        again = measure(make, seconds=seconds)
        runs.append(_unless_too_short(found.again(speed, again), again))
    return Probes(found.limit, tuple(runs))


def _unless_too_short(run: Probe, *speeds: LoaderSpeed) -> Probe:
    """Return the probe, without what it would say if one of the runs behind it was too short."""
    if not any(speed.is_too_short for speed in speeds):
        return run
    return replace(run, sentence="too short a run, which says nothing: measure longer", confirms=None)


def _hand_over(make: MakeLoader, speed: LoaderSpeed, seconds: float) -> float:
    with make(workers=0) as loader:
        layout = loader.engine.layout
    return hand_over_rate(layout, workers=speed.stats.workers, slots=DEFAULT_SLOTS, seconds=seconds)


@dataclass(frozen=True)
class _Measured:
    """The measurement with which the runs are compared."""

    speed: LoaderSpeed

    @property
    def limit(self) -> str:
        return self.speed.verdict.limit if self.speed.verdict else ""

    @property
    def _rate(self) -> float:
        return self.speed.images_per_second

    def encoded(self, rate: float) -> Probe:
        """Expected: faster by the transform's part of the workers' time, unless the hand-over limits."""
        times, expected = rate / self._rate, self._without(*TRANSFORM_STAGES)
        costs = (
            "so decoding and augmenting take the time"
            if times > FASTER
            else "so decoding and augmenting do not take the time"
        )
        confirms = None
        if self.limit != "hand-over" and not EXPECTED_EQUAL < expected < EXPECTED_FASTER:
            confirms = (times > FASTER) == (expected > FASTER)
        return Probe(
            "encoded",
            rate,
            f"without decoding {rate:,.0f} images/s, {times:.1f} times as many, {costs}",
            confirms,
        )

    def _without(self, *stages: str) -> float:
        """How many times as fast the workers would be without these stages."""
        loads = {load.name: load.seconds for load in self.speed.stats.loads if load.place == "worker"}
        left = sum(seconds for name, seconds in loads.items() if name not in stages)
        return sum(loads.values()) / max(left, 1e-12)

    def again(self, first: LoaderSpeed, second: LoaderSpeed) -> Probe:
        """Expected: faster from the page cache if reading limits and the shards were not in it before."""
        was, cached, rate = first.page_cache.before, second.page_cache.before, second.images_per_second
        faster = rate > FASTER * first.images_per_second
        if cached is None or cached < IN_MEMORY:
            why = "which says nothing about the storage: the shards are not all in memory"
        elif was is not None and was > IN_MEMORY:
            why = "from memory as before: the storage was not read"
        else:
            why = (
                "from memory, so the storage takes the time"
                if faster
                else "from memory, so the storage is fast"
            )
        return Probe("again", rate, f"encoded bytes once more {rate:,.0f} images/s, {why}", None)

    def one_core(self, rate: float) -> Probe:
        """Expected: near the rate of all cores if the workers decode all the time, below it if they wait."""
        stats = self.speed.stats
        cores = max(1, min(stats.workers, stats.cpus))
        share = self._rate / (cores * rate)
        confirms = (
            share > 1 / 3 if self.limit in TRANSFORM_STAGES else share < 0.8 if self.limit == "read" else None
        )
        return Probe(
            "one core",
            rate,
            f"one core makes {rate:,.0f} images/s of records in memory, so {cores} could make "
            f"{cores * rate:,.0f}, of which the loader reaches {share:.0%}",
            confirms,
        )

    def hand_over(self, rate: float) -> Probe:
        """Expected: faster than the loader, unless messages and memory limit."""
        faster = rate > FASTER * self._rate
        costs = "so that does not take the time" if faster else "so that takes the time"
        return Probe(
            "hand-over",
            rate,
            f"handing over batches without work {rate:,.0f} images/s, {costs}",
            faster != (self.limit in TRANSPORT_STAGES),
        )
