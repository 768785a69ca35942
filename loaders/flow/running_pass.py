"""A pass of a flow that is being drawn."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from shardprep.loaders.batching.passes import end
from shardprep.loaders.batching.stack import row_count
from shardprep.loaders.flow.core.meter import PassMeter


class RunningPass(Iterator[Any]):
    """The ``items`` of a pass, counted by ``meter``; with ``has_rows``, by their rows. Not thread-safe."""

    def __init__(self, items: Iterator[Any], meter: PassMeter, *, has_rows: bool) -> None:
        self._items = items
        self._meter = meter
        self._has_rows = has_rows

    def __next__(self) -> Any:
        began, rows = perf_counter(), None
        try:
            item = next(self._items)
            rows = row_count(item) if self._has_rows else 1
            return item
        except StopIteration:
            self._meter.is_over = True
            raise
        finally:
            self._meter.drew(began, rows)

    def close(self) -> None:
        """End the pass. Idempotent."""
        end(self._items)
