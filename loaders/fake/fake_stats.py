"""Counts and times of fake batches."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.loaders.loader.bottleneck import Verdict
from shardprep.loaders.loader.stats import LoaderStats

DELAY = "delay"
ADVICE = "FakeData itself takes this time, with seconds= for each record"


@dataclass(frozen=True, repr=False)
class FakeStats(LoaderStats):
    """Stats of a FakeData, in the form of a Loader's. There are no workers; the stage is the ``delay``."""

    @property
    def verdict(self) -> Verdict | None:
        """The stage that limits; None before the second batch."""
        return _with_own_advice(super().verdict)

    def of_workers(self) -> Verdict | None:
        """Return what limits the batches, also where the consumer is slower."""
        return _with_own_advice(super().of_workers())


def _with_own_advice(verdict: Verdict | None) -> Verdict | None:
    return replace(verdict, advice=ADVICE) if verdict and verdict.limit in (DELAY, "transport") else verdict


@dataclass
class FakeMeter:
    """Counts of all iterations. Thread-safe."""

    rows: int = 0
    timed: int = 0
    batches: int = 0
    elapsed: float = 0.0
    warming: float = 0.0
    starved: float = 0.0
    handing: float = 0.0
    making: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> FakeRun:
        """Return the counter of one iteration."""
        return FakeRun(self)

    def read(self, *, image_bytes: float) -> FakeStats:
        with self.lock:
            return FakeStats(
                rows=self.rows,
                timed=self.timed,
                batches=self.batches,
                elapsed=self.elapsed,
                warming=self.warming,
                starved=self.starved,
                handing=self.handing,
                blocked=0.0,
                filling=(self.making,),
                waiting=(0.0,),
                cpu=(0.0,),
                queued=(0.0,),
                stages={DELAY: self.making},
                copied=0,
                restarts=0,
                workers=0,
                cpus=usable_cpus(),
                image_bytes=image_bytes,
                crop_ready=0.0,
            )


class FakeRun:
    """The times of one iteration. As a Loader's, they count from its first batch on."""

    def __init__(self, meter: FakeMeter) -> None:
        self._meter = meter
        self._last: float | None = None

    def delivered(self, rows: int, *, began: float, ready: float, handed: float) -> None:
        """Count a batch: when its making began, when it was ready, and when it was handed over."""
        meter = self._meter
        with meter.lock:
            meter.batches += 1
            meter.rows += rows
            meter.making += ready - began
            meter.handing += handed - ready
            if self._last is None:
                meter.warming += ready - began
            else:
                meter.timed += rows
                meter.starved += ready - began
                meter.elapsed += ready - self._last
            self._last = ready
