"""Short runs in which a part of a loader's work is left out, to see what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from .ceilings import hand_over_rate, one_core_rate
from .loader import DEFAULT_SLOTS, Loader
from .loader_speed import LoaderSpeed
from .measure import measure
from .transforms import Transform

SECONDS = 2.0
FASTER = 1.25  # what is this many times as fast is faster, and not by chance
CLEARLY, HARDLY = 1.5, 1.1  # what is expected to be so many times as fast should turn out faster, or not
IN_MEMORY = 0.9  # the share of shards in the page cache from which on their storage is not read
OF_TRANSFORM = ("decode", "augment")
OF_TRANSPORT = ("transport", "hand-over")


class MakeLoader(Protocol):
    """Makes a loader; ``functools.partial(Loader, path, …)`` does."""

    def __call__(self, **options: Any) -> Loader: ...


@dataclass(frozen=True)
class Probe:
    """What came of one run: images/s, in a sentence, and whether that fits the verdict.

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
    """All runs, and the stage that they were to confirm as the limit."""

    limit: str
    runs: tuple[Probe, ...]

    @property
    def confirmed(self) -> bool | None:
        """Whether every run that says something about the limit fits it; None where none does."""
        said = [run.confirms for run in self.runs if run.confirms is not None]
        return all(said) if said else None

    def to_json(self) -> dict[str, Any]:
        """A value of JSON types."""
        return {"limit": self.limit, "confirmed": self.confirmed, "runs": list(map(asdict, self.runs))}


def probe(
    make: MakeLoader, speed: LoaderSpeed, transform: Transform | None, *, seconds: float = SECONDS
) -> Probes:
    """See in a few runs of ``seconds`` each whether the verdict of ``speed`` holds.

    ``make`` has to make the loader that was measured, with ``transform``, and another one where it is given
    options. The consumer does nothing in any of them. What a loader raises, this raises.
    """
    found = _Found(speed)
    runs = [found.hand_over(_hand_over(make, speed, seconds))]
    if transform is not None:
        first, second = (measure(partial(make, transform=None), seconds=seconds) for _ in range(2))
        runs += [found.encoded(first.images_per_second), found.again(first, second)]
        with make(workers=0) as loader:
            core = one_core_rate(loader.dataset, transform, seconds=seconds)
        runs.append(found.one_core(core))
    else:
        runs.append(found.again(speed, measure(make, seconds=seconds)))
    return Probes(found.limit, tuple(runs))


def _hand_over(make: MakeLoader, speed: LoaderSpeed, seconds: float) -> float:
    with make(workers=0) as loader:
        layout = loader._engine.layout
    return hand_over_rate(layout, workers=speed.stats.workers, slots=DEFAULT_SLOTS, seconds=seconds)


@dataclass(frozen=True)
class _Found:
    """The measurement that the runs are held against."""

    speed: LoaderSpeed

    @property
    def limit(self) -> str:
        return self.speed.verdict.limit if self.speed.verdict else ""

    @property
    def _rate(self) -> float:
        return self.speed.images_per_second

    def encoded(self, rate: float) -> Probe:
        """As much faster as the transform is of the workers' time; unless it is not they who limit."""
        times, expected = rate / self._rate, self._without(*OF_TRANSFORM)
        costs = (
            "so decoding and augmenting are what costs" if times > FASTER else "so they are not what costs"
        )
        confirms = None
        if self.limit != "hand-over" and not HARDLY < expected < CLEARLY:
            confirms = (times > FASTER) == (expected > FASTER)
        return Probe(
            "encoded",
            rate,
            f"without decoding {rate:,.0f} images/s, {times:.1f} times as many, {costs}",
            confirms,
        )

    def _without(self, *stages: str) -> float:
        """How many times as fast the workers would be without these."""
        loads = {load.name: load.seconds for load in self.speed.stats.loads if load.place == "worker"}
        left = sum(seconds for name, seconds in loads.items() if name not in stages)
        return sum(loads.values()) / max(left, 1e-12)

    def again(self, first: LoaderSpeed, second: LoaderSpeed) -> Probe:
        """Reading that limits gets faster by the page cache, where it was not there before."""
        was, cached, rate = first.page_cache.before, second.page_cache.before, second.images_per_second
        faster = rate > FASTER * first.images_per_second
        if cached is None or cached < IN_MEMORY:
            why = "which says nothing of the storage: the shards are not all in memory"
        elif was is not None and was > IN_MEMORY:
            why = "from memory as before: the storage was not read"
        else:
            why = (
                "from memory, so the storage is what costs"
                if faster
                else "from memory, so the storage is fast"
            )
        return Probe("again", rate, f"encoded bytes once more {rate:,.0f} images/s, {why}", None)

    def one_core(self, rate: float) -> Probe:
        """The workers that decode all the time reach what their cores can; those who wait do not."""
        stats = self.speed.stats
        cores = max(1, min(stats.workers, stats.cpus))
        share = self._rate / (cores * rate)
        confirms = (
            share > 1 / 3 if self.limit in OF_TRANSFORM else share < 0.8 if self.limit == "read" else None
        )
        return Probe(
            "one core",
            rate,
            f"one core makes {rate:,.0f} images/s of records in memory, so {cores} could make "
            f"{cores * rate:,.0f}, of which the loader reaches {share:.0%}",
            confirms,
        )

    def hand_over(self, rate: float) -> Probe:
        """Much faster than the loader, unless messages and memory are what limits."""
        faster = rate > FASTER * self._rate
        costs = "so that is not what costs" if faster else "so that is what costs"
        return Probe(
            "hand-over",
            rate,
            f"handing over batches with nothing in them {rate:,.0f} images/s, {costs}",
            faster != (self.limit in OF_TRANSPORT),
        )
