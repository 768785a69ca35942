"""Counters of a flow's passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import reduce
from typing import Any

from shardprep.loaders.flow.core.meter import PassMeter

from .running_pass import RunningPass
from .stats import FlowStats


class FlowMeter:
    """The sum of the counters of all passes. One thread at a time begins passes; any thread may read."""

    def __init__(self, *, has_rows: bool) -> None:
        self._has_rows = has_rows
        # the passes that are over, and the others; one tuple, so that a reader sees each pass once
        self._passes: tuple[FlowStats, list[tuple[weakref.ref[RunningPass], PassMeter]]] = (
            FlowStats(has_rows),
            [],
        )

    def count(self, items: Iterator[Any], meter: PassMeter) -> RunningPass:
        """Return a pass that is counted from now on."""
        begun = RunningPass(items, meter, has_rows=self._has_rows)
        total, known = self._passes
        running = [(drawn, of) for drawn, of in known if drawn() is not None]
        over = [of for drawn, of in known if drawn() is None]
        self._passes = self._sum(total, over), [*running, (weakref.ref(begun), meter)]
        return begun

    def read(self) -> FlowStats:
        total, known = self._passes
        return self._sum(total, [meter for _, meter in known])

    def _sum(self, total: FlowStats, meters: list[PassMeter]) -> FlowStats:
        passes = (FlowStats.of(meter, has_rows=self._has_rows) for meter in meters)
        return reduce(FlowStats.plus, passes, total)
