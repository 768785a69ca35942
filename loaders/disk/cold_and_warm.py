"""Rates of reading the same bytes twice: first cold, then from memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from .cold import COLD, DIRECT, FADVISE, ColdWay, drop, resident_part
from .open_files import OpenFiles
from .plans import Piece, Plan
from .profile import Measurement, Reads
from .reading import read

WARM = 0.99  # the least share of pages in memory that counts as warm
WARM_BYTES = 64 << 20  # shorter passes are repeated up to that, or they would measure the clock


class Plans(Protocol):
    """Where the passes' plans come from."""

    def next(self) -> Plan:
        """Another plan."""

    def passed(self, read: int) -> None:
        """So many bytes of it were read."""


class ColdAndWarm:
    """Rates in bytes per second, one for each round. Not thread-safe."""

    def __init__(self, files: OpenFiles, way: ColdWay, plans: Plans) -> None:
        self._files = files
        self._way = way
        self._plans = plans
        self._cold: list[float] = []
        self._warm: list[float] = []
        self._how = ""

    def round(self, seconds: float) -> None:
        """A cold pass for so many seconds at most, and a warm one of half as many. Raises OSError."""
        plan = self._plans.next()
        self._how = described(plan)
        pieces = self._read_cold(plan, seconds)
        if not pieces or self._way.method != FADVISE:
            pieces = read(self._files.descriptors, plan, seconds=seconds).pieces
        self._read_warm(replace(plan, pieces=pieces), seconds / 2)
        self._plans.passed(len(pieces) * plan.block)

    def _read_cold(self, plan: Plan, seconds: float) -> list[Piece]:
        """The pieces read, none where they would not have been cold."""
        if self._way.method == DIRECT:
            done = read(self._files.direct, replace(plan, ahead=0), seconds=seconds, direct=True)
        elif self._way.method and drop(self._files.descriptors, plan.pieces, plan.block) <= COLD:
            done = read(self._files.descriptors, plan, seconds=seconds)
        else:
            return []
        self._cold.append(done.rate)
        return done.pieces

    def _read_warm(self, plan: Plan, seconds: float) -> None:
        if not self._in_memory(plan):
            return
        times = max(1, WARM_BYTES // (len(plan.pieces) * plan.block))
        again = replace(plan, pieces=plan.pieces * times)
        self._warm.append(read(self._files.descriptors, again, seconds=seconds).rate)

    def _in_memory(self, plan: Plan) -> bool:
        try:
            return resident_part(self._files.descriptors, plan.pieces, plan.block) >= WARM
        except OSError:  # what cannot be mapped cannot be asked, and was just read
            return True

    @property
    def reads(self) -> Reads:
        """Medians over the rounds."""
        cold = self._how + cold_method(self._way.method)
        return Reads(
            Measurement.of(self._cold, cold), Measurement.of(self._warm, self._how + ", from memory")
        )


def described(plan: Plan) -> str:
    """How a plan is read, in words."""
    block = f"{plan.block >> 10} KiB" if plan.block >= 1024 else f"{plan.block} bytes"
    order = "at random places" if plan.random else "forward"
    ahead = f", asked for {plan.ahead} pieces ahead" if plan.ahead else ""
    threads = f" by {plan.depth} processes" if plan.depth > 1 else ""
    return f"preadv of {block} {order}{threads}{ahead}"


def cold_method(method: str | None) -> str:
    """How cold was had, in words."""
    return ", O_DIRECT" if method == DIRECT else ", pages dropped by posix_fadvise, checked by mincore"
