"""Who writes which rows of which slot: pure bookkeeping, without processes, clocks or memory.

A batch is opened on a free slot and cut into leases. A worker holds a few leases at a time; when it dies
they go to the next worker that asks. Batches are due in the order in which they were opened, each once.
A slot is free again when its batch came back from the consumer, or was abandoned and nobody writes to it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

from .payloads import Parcel
from .slots import CargoArrays
from .work import Items

CREDIT = 2  # leases a worker holds: one to work on, one not to wait for; more would pile up behind a slow row
STRIKES = 3  # workers that a row may take with it


@dataclass(frozen=True)
class Lease:
    """Rows ``first`` to ``first + len(items)`` of ``slot``, for ``batch`` of ``run``."""

    id: int
    run: int
    batch: int
    slot: int
    first: int
    items: Items


@dataclass(frozen=True)
class Failure:
    """Why a row has no outcome: an exception as it was packed, or what ended its workers."""

    row: int
    error: bytes = b""
    cause: str = ""


@dataclass
class LeasedBatch:
    """A batch on its way; finished when no row is missing, undeliverable when it has a failure."""

    number: int
    slot: int
    items: Items
    missing: int
    written: CargoArrays | None = None
    parcels: list[Parcel] = field(default_factory=list)
    failure: Failure | None = None


class Leases:
    """Not thread-safe. ``chunk`` is the greatest number of rows of a lease; unless ``ordered``, a batch is due
    as soon as it is finished."""

    def __init__(self, *, slots: int, workers: int, chunk: int, ordered: bool = True) -> None:
        self.run = 0
        self._ordered = ordered
        self._chunk = chunk
        self._free = deque(range(slots))
        self._held: list[dict[int, Lease]] = [{} for _ in range(workers)]
        self._ids = itertools.count(1)
        self._abandoned: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        self._opened = 0
        self._due = 0
        self._batches: dict[int, LeasedBatch] = {}
        self._waiting: deque[Lease] = deque()
        self._strikes: Counter[tuple[int, int]] = Counter()

    def begin(self, run: int) -> None:
        """Abandon every batch of the run before. Its slots return as its leases do."""
        slots = [batch.slot for batch in self._batches.values()]
        self._forget()
        self.run = run
        self._abandoned.update(slots)
        for slot in slots:
            self._free_if_abandoned(slot)

    @property
    def wants_batch(self) -> bool:
        """Fewer leases wait than there are workers."""
        return len(self._waiting) < len(self._held)

    @property
    def has_lease(self) -> bool:
        return bool(self._waiting)

    @property
    def has_slot(self) -> bool:
        return bool(self._free)

    def open(self, items: Items, written: CargoArrays | None = None) -> int:
        """Start the next batch on a free slot, which is returned; its leases are given out by :meth:`take`."""
        batch = LeasedBatch(self._opened, self._free.popleft(), items, len(items), written)
        self._opened += 1
        self._batches[batch.number] = batch
        rows = lease_rows(len(items), workers=len(self._held), chunk=self._chunk)
        for first in range(0, len(items), rows):
            part = items[first : first + rows]
            self._waiting.append(Lease(next(self._ids), self.run, batch.number, batch.slot, first, part))
        return batch.slot

    def held(self, worker: int) -> int:
        """Number of leases that the worker holds."""
        return len(self._held[worker])

    def take(self, worker: int) -> Lease | None:
        """The most urgent lease that nobody has, unless the worker holds enough.

        The last ones are for idle workers only: behind another lease they could wait for a slow row.
        """
        enough = 1 if self.wants_batch else CREDIT
        if not self._waiting or self.held(worker) >= enough:
            return None
        lease = self._waiting.popleft()
        self._held[worker][lease.id] = lease
        return lease

    def finish(self, worker: int, lease_id: int, message: memoryview) -> None:
        """The worker has written the lease's rows; ``message`` holds their outcomes."""
        lease = self._give_back(worker, lease_id)
        if batch := self._batch_of(lease):
            batch.parcels.append(Parcel(lease.first, len(lease.items), message))
            batch.missing -= len(lease.items)

    def fail(self, worker: int, lease_id: int, row: int, error: bytes) -> None:
        """A row of the worker's lease raised ``error``."""
        lease = self._give_back(worker, lease_id)
        self._fail(lease, Failure(_row_of_batch(lease, row), error=error))

    def lose(self, worker: int, lease_id: int, row: int, cause: str) -> None:
        """The worker is gone for certain; it was at ``row`` of the lease, or at none that it holds."""
        lost = list(self._held[worker].values())
        for lease in lost:
            self._give_back(worker, lease.id)
        self._waiting.extendleft(lease for lease in reversed(lost) if self._batch_of(lease))
        for lease in lost:
            if lease.id == lease_id and self._batch_of(lease):
                self._strike(lease, row, cause)

    def deliver(self) -> LeasedBatch | None:
        """The batch that is due, if it is finished or has failed; its slot is then the receiver's."""
        due = [self._batches[self._due]] if self._due in self._batches else []
        for batch in due if self._ordered else self._batches.values():
            if batch.failure or not batch.missing:
                self._due += 1
                return self._batches.pop(batch.number)
        return None

    def release(self, slot: int) -> None:
        """The receiver of a delivered batch is done with its slot, or never took it."""
        self._abandoned.add(slot)
        self._free_if_abandoned(slot)

    def _strike(self, lease: Lease, row: int, cause: str) -> None:
        row = _row_of_batch(lease, row)
        self._strikes[lease.batch, row] += 1
        if self._strikes[lease.batch, row] >= STRIKES:
            self._fail(lease, Failure(row, cause=cause))

    def _fail(self, lease: Lease, failure: Failure) -> None:
        if batch := self._batch_of(lease):
            batch.failure = batch.failure or failure
            self._waiting = deque(other for other in self._waiting if other.batch != lease.batch)

    def _batch_of(self, lease: Lease) -> LeasedBatch | None:
        return self._batches.get(lease.batch) if lease.run == self.run else None

    def _give_back(self, worker: int, lease_id: int) -> Lease:
        lease = self._held[worker].pop(lease_id)
        self._free_if_abandoned(lease.slot)
        return lease

    def _free_if_abandoned(self, slot: int) -> None:
        written = any(lease.slot == slot for held in self._held for lease in held.values())
        if slot in self._abandoned and not written:
            self._abandoned.remove(slot)
            self._free.append(slot)


def _row_of_batch(lease: Lease, row: int) -> int:
    """What happens after the last row of a lease counts as that row's."""
    return lease.first + min(row, len(lease.items) - 1)


def lease_rows(rows: int, *, workers: int, chunk: int) -> int:
    """Rows of a lease: a worker's share of the batch, or half of it, so that a fast one may take a third."""
    share = -(-rows // workers)
    return max(1, min(chunk, share if share <= 8 else -(-share // 2)))
