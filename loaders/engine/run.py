"""One pass over an engine's plans, shared by its consumer and its dispatcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.pickling import Pickled
from shardprep.loaders.buffers.slots import InputAreaArrays, Memory
from shardprep.loaders.engine.protocol.leases import LeasedBatch, RowFailure
from shardprep.loaders.engine.protocol.task import Items


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """The items of a batch, and its ``inputs``: offsets in the slot's input area, and values to write there.

    ``written`` are arrays that the workers write in the input area instead of the fields of the slot's
    layout. ``filled`` is called in any thread when the workers have ended with the batch, unless its run ends
    before that.
    """

    items: Items
    inputs: tuple[tuple[int, Pickled], ...] = ()
    written: InputAreaArrays | None = None
    filled: Callable[[], object] = _nothing


@dataclass(frozen=True, eq=False)
class NotReady:
    """In place of a plan: the next one is not ready, and ``wait`` returns when it is, or raises."""

    wait: Callable[[], object]


Plan = npt.ArrayLike | BatchRequest | NotReady


class BatchPlans:
    """The plans of a run, and how many drawn ones are due; their error waits for the batches before it."""

    def __init__(self, plans: Iterable[Plan], *, dtype: np.dtype[Any], rows: int) -> None:
        self._plans = iter(plans)
        self._dtype = dtype
        self._rows = rows
        self._outstanding = 0
        self._drained = False
        self._error: Exception | None = None

    def draw(self, enough: int) -> Iterable[BatchRequest]:
        """Draw further plans, at most ``enough``; wait for one only where no batch is due."""
        while enough > 0 and not self._drained:
            try:
                if isinstance(plan := next(self._plans), NotReady):
                    if self._outstanding:
                        return
                    plan.wait()
                    continue
                request = self._checked(plan)
            except StopIteration:
                self._drained = True
            except Exception as error:  # raised again when it is due
                self._drained, self._error = True, error
            else:
                enough -= 1
                self._outstanding += 1
                yield request

    def claim(self) -> bool:
        """Count a drawn plan as delivered; False when none is due. Raises the plans' error then."""
        if self._outstanding:
            self._outstanding -= 1
            return True
        if self._error:
            raise self._error
        return False

    def _checked(self, plan: npt.ArrayLike | BatchRequest) -> BatchRequest:
        if isinstance(plan, BatchRequest):
            return replace(plan, items=self._checked_items(plan.items))
        return BatchRequest(self._checked_items(plan))

    def _checked_items(self, plan: npt.ArrayLike) -> Items:
        items = np.array(plan)
        if items.ndim != 1 or len(items) > self._rows:
            raise UsageError(f"a plan of shape {items.shape} does not fit a batch of {self._rows} rows")
        if len(items) and not np.can_cast(items.dtype, self._dtype, "same_kind"):
            raise UsageError(f"a plan of {items.dtype} was given where the work takes {self._dtype}")
        return items.astype(self._dtype)


@dataclass(frozen=True, eq=False)
class FinishedBatch:
    """A batch and the memory that it lies in; its slot is free again when that memory is dropped."""

    batch: LeasedBatch
    memory: Memory


@dataclass(frozen=True, eq=False)
class Failed:
    """A batch that cannot be delivered, and why; its slot is free already."""

    batch: LeasedBatch
    failure: RowFailure


@dataclass(eq=False)
class EngineRun:
    """The queues of a run: plans to the dispatcher, results to the consumer, in order, without locks.

    None as a result means that no more follow: the run was stopped, or the dispatcher has ended.
    """

    number: int
    plans: deque[BatchRequest] = field(default_factory=deque)
    results: SimpleQueue[FinishedBatch | Failed | None] = field(default_factory=SimpleQueue)
    stopped: bool = False

    def stop(self) -> None:
        self.stopped = True
        self.results.put(None)

    def clear(self) -> None:
        """Release the results that were not taken."""
        with suppress(Empty):
            while True:
                self.results.get_nowait()
        self.results.put(None)
