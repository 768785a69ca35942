"""Measurement of a flow: the rate at which it delivers to a consumer that does nothing."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.stack import row_count
from shardprep.loaders.flow.core.checks import seconds_of
from shardprep.loaders.flow.core.node import Node, Step
from shardprep.loaders.flow.map.per_item import PerItem
from shardprep.loaders.flow.steps.batch import Batch, BatchByShape, Unbatch
from shardprep.loaders.measuring.arrivals import Arrivals


class Measured(Protocol):
    """A flow: iterating it runs the next pass of its ``node``."""

    @property
    def node(self) -> Node: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class FlowSpeed:
    """The speed of a flow: ``items`` items in ``seconds`` after the first item, over ``passes`` passes.

    ``items_per_second``, ``rows_per_second`` and ``megabytes_per_second`` are medians over windows of half a
    second or more. A megabyte is a million bytes, of arrays and bytes in the items, at any depth. ``rows``
    are those of batches; both row figures are None where the flow makes no batches. ``p50_milliseconds`` and
    ``p99_milliseconds`` are the median and the 99th percentile of the time between two items.
    ``first_item_seconds`` is the time until the first item, with the start of workers.
    ``cpu_seconds_per_item`` is the CPU time of this process with all its threads.
    """

    items: int
    rows: int | None
    passes: int
    seconds: float
    items_per_second: float
    rows_per_second: float | None
    megabytes_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    first_item_seconds: float
    cpu_seconds_per_item: float

    def to_dict(self) -> dict[str, Any]:
        """A value of JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        rows = "" if self.rows_per_second is None else f"{self.rows_per_second:,.0f} rows/s, "
        return (
            f"{self.items_per_second:,.1f} items/s, {rows}{self.megabytes_per_second:,.1f} MB/s over "
            f"{self.seconds:,.1f} s and {self.passes:,} pass{'es' if self.passes > 1 else ''}: "
            f"{self.p50_milliseconds:,.3g} ms from item to item, 1 in 100 over {self.p99_milliseconds:,.3g} ms, "
            f"the first after {self.first_item_seconds:,.3g} s, {self.cpu_seconds_per_item * 1e3:,.3g} ms of this "
            "process's CPU per item."
        )


def measure(flow: Measured, *, seconds: float) -> FlowSpeed:
    """Draw the flow's next passes, one after the other, for ``seconds`` after the first item.

    At least one item is measured after the first. Raises UsageError for a pass without items, and the
    exceptions of the flow.
    """
    seconds = seconds_of(seconds, "how long a flow is measured")
    began = time.perf_counter()
    drawn = _DrawnItems(flow)
    with closing(drawn.items()) as items:
        arrivals = Arrivals(items, drawn.count)
        arrivals.draw()
        cpu, drawn.bytes, drawn.rows = time.process_time(), 0, 0
        arrivals.draw_for(seconds)
        cpu = time.process_time() - cpu
    rate, (p50, p99) = arrivals.rate, arrivals.gaps
    return FlowSpeed(
        items=arrivals.count,
        rows=drawn.rows if drawn.makes_batches else None,
        passes=drawn.passes,
        seconds=arrivals.seconds,
        items_per_second=rate,
        rows_per_second=rate * drawn.rows / arrivals.count if drawn.makes_batches else None,
        megabytes_per_second=rate * drawn.bytes / arrivals.count / 1e6,
        p50_milliseconds=p50 * 1e3,
        p99_milliseconds=p99 * 1e3,
        first_item_seconds=arrivals.first - began,
        cpu_seconds_per_item=cpu / arrivals.count,
    )


class _DrawnItems:
    """The items of a flow, pass after pass, with counts."""

    def __init__(self, flow: Measured) -> None:
        self.makes_batches = makes_batches(flow.node)
        self.passes = self.bytes = self.rows = 0
        self._flow = flow
        self._is_empty = True  # the current pass, so far

    def items(self) -> Generator[Any, None, None]:
        while True:
            self._is_empty, self.passes = True, self.passes + 1
            yield from self._flow
            if self._is_empty:
                raise UsageError("a pass of this flow has no items, so there is nothing to measure")

    def count(self, item: Any) -> int:
        self._is_empty = False
        self.bytes += _bytes_in(item)
        self.rows += row_count(item) if self.makes_batches else 0
        return 1


def makes_batches(node: Node) -> bool:
    """Whether the last step that makes new items, and does not only pass them on, makes batches."""
    while isinstance(node, Step) and not isinstance(node, Batch | BatchByShape | Unbatch | PerItem):
        node = node.source
    return isinstance(node, Batch | BatchByShape)


def _bytes_in(part: Any) -> int:
    if isinstance(part, np.ndarray | np.generic | memoryview):
        return part.nbytes
    if isinstance(part, bytes | bytearray):
        return len(part)
    if isinstance(part, Mapping):
        return sum(map(_bytes_in, part.values()))
    return sum(map(_bytes_in, part)) if isinstance(part, tuple | list) else 0
