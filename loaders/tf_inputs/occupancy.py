"""How full a queue is, and who waits for whom."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from ..loader_stats import LoaderStats
from ..verdict import StageLoad, Verdict, loads_to_list
from .limits import load_of, verdict_of


@dataclass(frozen=True)
class InputStats:
    """An input since it was made; those that hold nothing back have capacity 0.

    ``fed`` batches went in, ``batches`` came out. ``level`` are in it now, ``mean_level`` were on average whenever
    another came. ``starved`` is the share of steps that found it empty, ``blocked`` the share of batches that
    found it full; ``starved_seconds`` and ``blocked_seconds`` are how long these waited. ``elapsed`` seconds were
    epochs under way, each from its first batch on, of which steps waited ``waited`` seconds; its thread waited
    ``fetching`` seconds for the source and worked ``converting`` on what came. ``source`` is the input that feeds
    it, ``loader`` the Loader.

    A step that dequeues inside of a graph cannot be seen waiting: there, ``starved`` is the share of batches
    that came to an empty queue, and the seconds of steps are 0.
    """

    name: str
    capacity: int
    level: int
    mean_level: float
    fed: int
    batches: int
    epochs: int
    starved: float
    blocked: float
    starved_seconds: float
    blocked_seconds: float
    elapsed: float
    waited: float
    fetching: float
    converting: float
    unseen: bool = False
    source: InputStats | None = None
    loader: LoaderStats | None = None

    @property
    def load(self) -> StageLoad | None:
        """This input as a stage, per batch; None before it was used."""
        return load_of(self)

    @property
    def verdict(self) -> Verdict | None:
        """What limits, from the Loader's stages over the inputs to the training step; None before it is known."""
        return verdict_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain JSON values, with the verdict."""
        verdict, load = self.verdict, self.load
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("source", "loader")},
            "source": self.source.to_dict() if self.source else None,
            "loader": self.loader.to_dict() if self.loader else None,
            "load": loads_to_list([load])[0] if load else None,
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __str__(self) -> str:
        shares = f"{self.name}: {self.starved:.0%} of steps found it empty, {self.blocked:.0%} of batches found it full"
        return f"{shares}; {self.verdict}" if self.verdict else shares


def loader_stats(source: object) -> LoaderStats | None:
    """The stats of a Loader; None for other sources."""
    stats = getattr(source, "stats", None)
    found = stats() if callable(stats) else None
    return found if isinstance(found, LoaderStats) else None


class Occupancy:
    """Counts for :class:`InputStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fed = self._taken = self._levels = self._found_full = self._found_empty = self._epochs = 0
        self._starved = self._blocked = self._waited = self._elapsed = 0.0
        self._fetching = self._converting = 0.0
        self._first: float | None = None  # when the epoch under way had its first batch
        self._unseen = False

    def drew(self, fetching: float, converting: float) -> None:
        """The thread waited so long for the source's batch, and worked so long on it."""
        with self._lock:
            self._fetching += fetching
            self._converting += converting

    def fed(self, level: int, *, full: bool, seconds: float, unseen: bool) -> None:
        """A batch came while ``level`` were there, and waited for room if it was ``full``.

        ``unseen`` steps take batches without telling; then it counts as their having waited if none was there.
        """
        with self._lock:
            self._fed += 1
            self._levels += level
            self._found_full += full
            self._blocked += seconds if full else 0.0
            if unseen:
                self._unseen = True
                self._count_step(waited=0.0 if level == 0 else None)

    def taken(self, *, waited: float | None) -> None:
        """A step got a batch, for which it had to wait so many seconds, or not at all."""
        with self._lock:
            self._count_step(waited=waited)

    def _count_step(self, waited: float | None) -> None:
        self._taken += 1
        self._found_empty += waited is not None
        self._starved += waited or 0.0
        if self._first is None:  # the wait for an epoch's first batch says nothing of the rest
            self._first = perf_counter()
        else:
            self._waited += waited or 0.0

    def epoch(self) -> None:
        """An epoch is over, or left."""
        with self._lock:
            self._epochs += 1
            self._elapsed, self._first = self._elapsed_now(), None

    def _elapsed_now(self) -> float:
        return self._elapsed if self._first is None else self._elapsed + perf_counter() - self._first

    def read(
        self,
        name: str,
        *,
        capacity: int,
        level: int,
        source: InputStats | None = None,
        loader: LoaderStats | None = None,
    ) -> InputStats:
        with self._lock:
            return InputStats(
                name=name,
                capacity=capacity,
                level=level,
                mean_level=self._levels / max(1, self._fed),
                fed=self._fed,
                batches=self._taken,
                epochs=self._epochs,
                starved=self._found_empty / max(1, self._taken),
                blocked=self._found_full / max(1, self._fed),
                starved_seconds=self._starved,
                blocked_seconds=self._blocked,
                elapsed=self._elapsed_now(),
                waited=self._waited,
                fetching=self._fetching,
                converting=self._converting,
                unseen=self._unseen,
                source=source,
                loader=loader,
            )
