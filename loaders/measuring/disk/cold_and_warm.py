"""Rates of reading the same bytes cold and then warm, from memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from .page_cache import (
    COLD,
    DIRECT,
    FADVISE,
    ColdWay,
    drop,
    resident_part,
)
from .profile import Measurement, Reads
from .read_plans import Piece, ReadPlan
from .reading import read
from .target import OpenFiles

WARM = 0.99  # the least share of pages in memory that counts as warm
WARM_BYTES = 64 << 20  # shorter passes are repeated up to this, because they are too short to time


class ReadPlans(Protocol):
    """The source of the plans of passes."""

    def next(self) -> ReadPlan:
        """Return the next plan."""

    def passed(self, read: int) -> None:
        """Note that ``read`` bytes of the plan were read."""


class ColdAndWarm:
    """Cold and warm rates in bytes per second, one for each round. Not thread-safe."""

    def __init__(self, files: OpenFiles, way: ColdWay, plans: ReadPlans) -> None:
        self._files = files
        self._way = way
        self._plans = plans
        self._cold: list[float] = []
        self._warm: list[float] = []
        self._how = ""

    def round(self, seconds: float) -> None:
        """Measure a cold pass of at most ``seconds``, and a warm one of half as many. Raises OSError."""
        plan = self._plans.next()
        self._how = described(plan)
        pieces = self._read_cold(plan, seconds)
        if not pieces or self._way.method != FADVISE:
            pieces = read(self._files.descriptors, plan, seconds=seconds).pieces
        self._read_warm(replace(plan, pieces=pieces), seconds / 2)
        self._plans.passed(len(pieces) * plan.block)

    def _read_cold(self, plan: ReadPlan, seconds: float) -> list[Piece]:
        """Read cold and return the pieces read; none where they would not have been cold."""
        if self._way.method == DIRECT:
            done = read(self._files.direct, replace(plan, ahead=0), seconds=seconds, direct=True)
        elif self._way.method and drop(self._files.descriptors, plan.pieces, plan.block) <= COLD:
            done = read(self._files.descriptors, plan, seconds=seconds)
        else:
            return []
        self._cold.append(done.rate)
        return done.pieces

    def _read_warm(self, plan: ReadPlan, seconds: float) -> None:
        if not self._in_memory(plan):
            return
        times = max(1, WARM_BYTES // (len(plan.pieces) * plan.block))
        again = replace(plan, pieces=plan.pieces * times)
        self._warm.append(read(self._files.descriptors, again, seconds=seconds).rate)

    def _in_memory(self, plan: ReadPlan) -> bool:
        try:
            return resident_part(self._files.descriptors, plan.pieces, plan.block) >= WARM
        except OSError:  # files that cannot be mapped cannot be checked, and were just read
            return True

    @property
    def reads(self) -> Reads:
        """Medians over the rounds."""
        cold = self._how + cold_method(self._way.method)
        return Reads(
            Measurement.of(self._cold, cold), Measurement.of(self._warm, self._how + ", from memory")
        )


def described(plan: ReadPlan) -> str:
    """Describe how a plan is read."""
    block = f"{plan.block >> 10} KiB" if plan.block >= 1024 else f"{plan.block} bytes"
    order = "at random places" if plan.random else "forward"
    ahead = f", requested {plan.ahead} pieces ahead" if plan.ahead else ""
    processes = f" by {plan.depth} processes" if plan.depth > 1 else ""
    return f"preadv of {block} {order}{processes}{ahead}"


def cold_method(method: str | None) -> str:
    """Describe the method of cold reads."""
    return ", O_DIRECT" if method == DIRECT else ", pages dropped by posix_fadvise, checked by mincore"
