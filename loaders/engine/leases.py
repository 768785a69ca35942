"""The leases of workers on the rows of slots, and the messages that carry them.

Leases are pure bookkeeping, without processes, clocks or memory. A batch is opened on a free slot and split
into leases. A worker holds a few leases at a time; if it dies, they go to the next worker that asks. Batches
are delivered once, in the order of their opening. A slot becomes free when the consumer has released its
batch, or when its batch was abandoned and no worker writes to it any more.
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from shardprep.loaders.engine.messages import Items, LeaseOutcomes, ResultRows

LEASES_PER_WORKER = 2  # one to fill and one to continue with; more would wait behind a slow row
MAX_ROW_FAILURES = 3  # workers that may die at a row before it fails


@dataclass(frozen=True, eq=False)
class Lease:
    """Rows ``first`` to ``first + len(items)`` of ``slot``, for ``batch`` of ``run``."""

    id: int
    run: int
    batch: int
    slot: int
    first: int
    items: Items


@dataclass(frozen=True)
class RowFailure:
    """Why a row has no outcome: a packed exception, or the cause of its workers' deaths."""

    row: int
    error: bytes = b""
    cause: str = ""


@dataclass
class LeasedBatch:
    """A batch in progress: finished when no row is missing, undeliverable if it has a failure.

    ``left_out`` maps each row that no worker could finish to the reason.
    """

    number: int
    slot: int
    items: Items
    missing_rows: int
    result_rows: ResultRows | None = None
    on_filled: Callable[[], object] | None = None
    outcomes: list[LeaseOutcomes] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    failure: RowFailure | None = None


class Leases:
    """The leases of one engine. Not thread-safe.

    ``chunk`` is the maximum number of rows per lease. Unless ``ordered``, a batch is due as soon as it is
    finished. A row at which MAX_ROW_FAILURES workers have died fails its batch, or is left out of it if all
    died of one of the ``skip_causes``.
    """

    def __init__(
        self, *, slots: int, workers: int, chunk: int, ordered: bool = True, skip_causes: Container[str] = ()
    ) -> None:
        self.run = 0
        self._ordered = ordered
        self._skip_causes = skip_causes
        self._chunk = chunk
        self._slots = slots
        self._occupied: set[int] = set()  # by a batch in progress, or one that the consumer holds
        self._held: list[dict[int, Lease]] = [{} for _ in range(workers)]
        self._ids = itertools.count(1)
        self._reset()

    def _reset(self) -> None:
        self._opened = 0
        self._due = 0
        self._batches: dict[int, LeasedBatch] = {}
        self._waiting: deque[Lease] = deque()
        self._failures: defaultdict[tuple[int, int], list[str]] = defaultdict(list)

    def begin(self, run: int) -> None:
        """Abandon all batches of the previous run. Their slots become free as their leases return."""
        self._occupied.difference_update(batch.slot for batch in self._batches.values())
        self._reset()
        self.run = run

    @property
    def wants_batch(self) -> bool:
        """Whether fewer leases wait than there are workers."""
        return len(self._waiting) < len(self._held)

    @property
    def has_lease(self) -> bool:
        return bool(self._waiting)

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots())

    def _free_slots(self) -> list[int]:
        """The slots that no batch occupies and to which no worker writes for an abandoned batch."""
        written = {lease.slot for leases in self._held for lease in leases.values()}
        return [slot for slot in range(self._slots) if slot not in self._occupied and slot not in written]

    def open(
        self, items: Items, rows: ResultRows | None = None, on_filled: Callable[[], object] | None = None
    ) -> int:
        """Start the next batch on a free slot and return the slot; :meth:`take` gives out its leases."""
        batch = LeasedBatch(self._opened, self._free_slots()[0], items, len(items), rows, on_filled)
        self._occupied.add(batch.slot)
        self._opened += 1
        self._batches[batch.number] = batch
        share = -(-len(items) // len(self._held))  # per worker; with halves, a fast worker can take a third
        size = max(1, min(self._chunk, share if share <= 8 else -(-share // 2)))
        for first in range(0, len(items), size):
            part = items[first : first + size]
            self._waiting.append(Lease(next(self._ids), self.run, batch.number, batch.slot, first, part))
        return batch.slot

    def held_count(self, worker: int) -> int:
        return len(self._held[worker])

    def item(self, worker: int, lease_id: int, row: int) -> Any:
        """Return the item at ``row`` of a lease, None unless the worker holds it."""
        lease = self._held[worker].get(lease_id)
        return lease.items[row] if lease and row < len(lease.items) else None

    def take(self, worker: int) -> Lease | None:
        """Give the worker the most urgent free lease, unless it holds enough.

        The last leases go to idle workers only: behind another lease they could wait for a slow row.
        """
        enough = 1 if self.wants_batch else LEASES_PER_WORKER
        if not self._waiting or self.held_count(worker) >= enough:
            return None
        lease = self._waiting.popleft()
        self._held[worker][lease.id] = lease
        return lease

    def finish(self, worker: int, lease_id: int, message: memoryview) -> Lease:
        """Record that the worker has written the lease's rows; ``message`` holds their outcomes."""
        lease = self._held[worker].pop(lease_id)
        if batch := self._batch_of(lease):
            batch.outcomes.append(LeaseOutcomes(lease.first, len(lease.items), message))
            batch.missing_rows -= len(lease.items)
        return lease

    def fail(self, worker: int, lease_id: int, row: int, error: bytes) -> None:
        """Record that a row of the worker's lease raised ``error``."""
        lease = self._held[worker].pop(lease_id)
        self._fail(lease, RowFailure(_row_of_batch(lease, row), error=error))

    def lose(self, worker: int, lease_id: int, row: int, cause: str) -> None:
        """Reassign the leases of a worker that died, at ``row`` of the lease if it holds that one."""
        lost, self._held[worker] = self._held[worker], {}
        freed: list[Lease] = []
        for lease in lost.values():
            if (batch := self._batch_of(lease)) and not batch.failure:
                freed += self._replacements(batch, lease, row, cause) if lease.id == lease_id else [lease]
        self._waiting.extendleft(reversed(freed))

    def deliver(self) -> LeasedBatch | None:
        """Return the batch that is due, if it is finished or has failed; the receiver then owns its slot."""
        due = [self._batches[self._due]] if self._due in self._batches else []
        for batch in due if self._ordered else self._batches.values():
            if batch.failure or not batch.missing_rows:
                self._due += 1
                return self._batches.pop(batch.number)
        return None

    def release(self, slot: int) -> None:
        """Free the slot of a delivered batch that its receiver has dropped or never took."""
        self._occupied.discard(slot)

    def _replacements(self, batch: LeasedBatch, lease: Lease, row: int, cause: str) -> list[Lease]:
        """Return the leases to give in place of one at whose row a worker died."""
        row = _row_of_batch(lease, row)
        causes = self._failures[lease.batch, row]
        causes.append(cause)
        if len(causes) < MAX_ROW_FAILURES:
            return [lease]
        if not all(each in self._skip_causes for each in causes):
            self._fail(lease, RowFailure(row, cause=cause))
            return []
        batch.left_out[row] = f"its workers crashed by {cause}"
        batch.missing_rows -= 1
        place = row - lease.first
        parts = (lease.first, lease.items[:place]), (row + 1, lease.items[place + 1 :])
        return [replace(lease, id=next(self._ids), first=n, items=part) for n, part in parts if len(part)]

    def _fail(self, lease: Lease, failure: RowFailure) -> None:
        if batch := self._batch_of(lease):
            batch.failure = batch.failure or failure
            self._waiting = deque(other for other in self._waiting if other.batch != lease.batch)

    def _batch_of(self, lease: Lease) -> LeasedBatch | None:
        return self._batches.get(lease.batch) if lease.run == self.run else None


def _row_of_batch(lease: Lease, row: int) -> int:
    """Return the row's number in its batch; a failure after a lease's last row counts for that row."""
    return lease.first + min(row, len(lease.items) - 1)


_LEASE = struct.Struct("<QQII")
_ANSWER = struct.Struct("<BQI")

MAX_LEASE_BYTES = 1 << 15  # a worker's leases fit into its socket, so sending never blocks


class Answer(IntEnum):
    """The kind of a worker's message."""

    READY = 0  # the work is open
    DONE = 1  # a lease is finished, and its outcomes follow; or it was skipped because its run is over
    FAILED = 2  # a row raised, or, before READY, opening the work did; the packed exception follows


def pack_lease(lease: Lease) -> tuple[bytes, bytes]:
    return _LEASE.pack(lease.id, lease.run, lease.slot, lease.first), lease.items.tobytes()


def unpack_lease(message: bytes, dtype: np.dtype[np.void]) -> Lease:
    """Return the lease of a message, without its batch number, which a worker does not need."""
    lease_id, run, slot, first = _LEASE.unpack_from(message)
    items: Items = np.frombuffer(message, dtype, offset=_LEASE.size)
    return Lease(lease_id, run, -1, slot, first, items)


def pack_answer(answer: Answer, lease_id: int = 0, row: int = 0) -> bytes:
    return _ANSWER.pack(answer, lease_id, row)


def unpack_answer(message: bytes) -> tuple[Answer, int, int, memoryview]:
    """Return the answer, the lease, the row of the lease, and the rest of the message."""
    answer, lease_id, row = _ANSWER.unpack_from(message)
    return Answer(answer), lease_id, row, memoryview(message)[_ANSWER.size :]
