"""Leases: every row once, in order, however workers start and end; the bookkeeping alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.loaders.engine.leases import (
    LEASES_PER_WORKER,
    MAX_ROW_FAILURES,
    LeasedBatch,
    Leases,
    RowFailure,
    lease_rows,
)
from shardprep.loaders.engine.messages import Skipped

NOTHING = memoryview(bytes(4))


def leases(*, slots: int = 2, workers: int = 2, chunk: int = 4) -> Leases:
    made = Leases(slots=slots, workers=workers, chunk=chunk)
    made.begin(1)
    return made


def rows_of(batch: LeasedBatch) -> list[int]:
    return sorted(row for part in batch.outcomes for row in range(part.first, part.first + part.count))


class Game:
    """A simulated consumer and workers, driven by a list of numbers, each a move."""

    def __init__(self, plans: list[int], *, slots: int, workers: int, chunk: int) -> None:
        self.plans = [np.arange(rows) for rows in plans]
        self.workers = workers
        self.leases = leases(slots=slots, workers=workers, chunk=chunk)
        self.held: list[list[int]] = [[] for _ in range(workers)]
        self.out: list[LeasedBatch] = []
        self.written_by: dict[int, set[int]] = {slot: set() for slot in range(slots)}
        self.delivered: list[LeasedBatch] = []
        self.waiting = list(self.plans)

    def move(self, number: int) -> None:
        worker, kind = number % self.workers, number // self.workers % 5
        if kind < 2:
            self.take(worker)
        elif kind == 2:
            self.finish(worker)
        elif kind == 3:
            self.lose(worker)
        self.collect()
        if kind == 4 and self.out:
            self.leases.release(self.out.pop(0).slot)

    def take(self, worker: int) -> None:
        while self.leases.wants_batch and self.leases.has_slot and self.waiting:
            self.leases.open(self.waiting.pop(0))
        if lease := self.leases.take(worker):
            assert lease.slot not in {batch.slot for batch in self.out}, "written while it is read"
            self.held[worker].append(lease.id)
        assert len(self.held[worker]) <= LEASES_PER_WORKER

    def finish(self, worker: int) -> None:
        if self.held[worker]:
            self.leases.finish(worker, self.held[worker].pop(0), NOTHING)

    def lose(self, worker: int) -> None:
        self.leases.lose(worker, 0, 0, "SIGKILL")
        self.held[worker].clear()

    def collect(self) -> None:
        while batch := self.leases.deliver():
            self.delivered.append(batch)
            self.out.append(batch)

    def end(self) -> None:
        """Let all workers finish their leases until nothing is left."""
        while len(self.delivered) < len(self.plans):
            for worker in range(self.workers):
                self.take(worker)
                self.finish(worker)
            self.collect()
            while self.out:
                self.leases.release(self.out.pop().slot)


@settings(deadline=None)
@given(
    plans=st.lists(st.integers(0, 40), max_size=12),
    slots=st.integers(1, 4),
    workers=st.integers(1, 5),
    chunk=st.integers(1, 9),
    moves=st.lists(st.integers(0, 10**6), max_size=120),
)
def test_each_row_of_each_batch_is_delivered_once_and_in_order(
    plans: list[int], slots: int, workers: int, chunk: int, moves: list[int]
) -> None:
    game = Game(plans, slots=slots, workers=workers, chunk=chunk)

    for number in moves:
        game.move(number)
    game.end()

    assert [len(batch.items) for batch in game.delivered] == plans
    assert all(rows_of(batch) == list(range(len(batch.items))) for batch in game.delivered)


@settings(deadline=None)
@given(moves=st.lists(st.integers(0, 10**6), max_size=80), workers=st.integers(1, 4), rows=st.integers(1, 20))
def test_after_a_run_is_abandoned_at_any_point_the_next_one_is_exact(
    moves: list[int], workers: int, rows: int
) -> None:
    game = Game([rows] * 6, slots=3, workers=workers, chunk=3)
    for number in moves:
        game.move(number)
    for batch in game.out:
        game.leases.release(batch.slot)

    game.leases.begin(2)
    game.out, game.delivered, game.waiting = [], [], list(game.plans)
    game.end()

    assert [batch.number for batch in game.delivered] == list(range(6))
    assert all(rows_of(batch) == list(range(rows)) for batch in game.delivered)


def test_a_slot_that_a_worker_still_writes_to_is_not_given_to_the_next_run() -> None:
    table = leases(slots=1)
    table.open(np.arange(4))
    late = table.take(0)
    assert late is not None

    table.begin(2)
    assert not table.has_slot
    table.finish(0, late.id, NOTHING)

    assert table.has_slot
    assert table.deliver() is None


def test_a_slot_is_free_once_the_worker_that_wrote_to_it_is_lost() -> None:
    table = leases(slots=1)
    table.open(np.arange(4))
    table.take(0)

    table.begin(2)
    table.lose(0, 0, 0, "SIGKILL")

    assert table.has_slot
    assert table.wants_batch


def test_the_leases_of_a_lost_worker_are_the_next_to_be_taken() -> None:
    table = leases(workers=2, chunk=1)
    table.open(np.arange(10))
    lost = [table.take(0), table.take(0)]

    table.lose(0, 0, 0, "SIGKILL")

    assert [table.take(1), table.take(1)] == lost


def test_a_row_that_ends_three_workers_fails_its_batch_but_not_the_one_before() -> None:
    table = leases(workers=2, chunk=2)
    table.open(np.arange(1))
    table.open(np.arange(4))
    first = table.take(0)
    assert first is not None

    for _ in range(MAX_ROW_FAILURES):
        poison = table.take(1)
        assert poison is not None
        table.lose(1, poison.id, 1, "SIGSEGV")
    assert table.deliver() is None
    table.finish(0, first.id, NOTHING)
    good, bad = table.deliver(), table.deliver()

    assert good is not None
    assert good.failure is None
    assert bad is not None
    assert bad.failure == RowFailure(1, cause="SIGSEGV")
    assert table.take(1) is None


def crash_reason(cause: str) -> str | None:
    return f"crashed by {cause}" if cause == "SIGSEGV" else None


@pytest.mark.parametrize("row", [0, 2, 4])
def test_a_row_that_only_crashes_workers_may_be_left_out_of_its_batch(row: int) -> None:
    table = Leases(slots=1, workers=2, chunk=5, reason_to_skip=crash_reason)
    table.begin(1)
    table.open(np.arange(10))
    other = table.take(1)
    assert other is not None

    for _ in range(MAX_ROW_FAILURES):
        poison = table.take(0)
        assert poison is not None
        table.lose(0, poison.id, row, "SIGSEGV")
    left = []
    while (lease := table.take(0)) is not None:
        left += lease.items.tolist()
        table.finish(0, lease.id, NOTHING)
    table.finish(1, other.id, NOTHING)
    batch = table.deliver()

    assert sorted(left + other.items.tolist()) == [n for n in range(10) if n != poison.items[row]]
    assert batch is not None
    assert batch.failure is None
    assert rows_of(batch) == list(range(10))
    (skipped,) = (part for part in batch.outcomes if part.message != NOTHING)
    assert list(skipped.unpack(np.empty(0, np.uint8))) == [
        (poison.first + row, Skipped("crashed by SIGSEGV"))
    ]


def test_a_row_that_also_ended_a_worker_in_another_way_fails_its_batch() -> None:
    table = Leases(slots=1, workers=1, chunk=5, reason_to_skip=crash_reason)
    table.begin(1)
    table.open(np.arange(5))

    for cause in ["SIGSEGV"] * (MAX_ROW_FAILURES - 1) + ["SIGKILL"]:
        lease = table.take(0)
        assert lease is not None
        table.lose(0, lease.id, 3, cause)

    batch = table.deliver()
    assert batch is not None
    assert batch.failure == RowFailure(3, cause="SIGKILL")


def test_a_worker_lost_between_leases_is_no_strike_against_a_row() -> None:
    table = leases(workers=1)
    table.open(np.arange(4))

    for _ in range(MAX_ROW_FAILURES + 1):
        lease = table.take(0)
        table.lose(0, 0, 0, "SIGKILL")

    assert table.take(0) == lease
    assert table.deliver() is None


def test_an_error_does_not_wait_for_the_other_rows_of_its_batch() -> None:
    table = leases(chunk=2)
    table.open(np.arange(8))
    bad = table.take(0)
    table.take(1)
    assert bad is not None

    table.fail(0, bad.id, 1, b"packed")
    batch = table.deliver()

    assert batch is not None
    assert batch.failure is not None
    assert (batch.failure.row, batch.failure.error) == (bad.first + 1, b"packed")


@settings(deadline=None)
@given(rows=st.integers(0, 3000), workers=st.integers(1, 100), chunk=st.integers(1, 64))
def test_a_batch_is_cut_so_that_all_workers_have_a_part(rows: int, workers: int, chunk: int) -> None:
    size = lease_rows(rows, workers=workers, chunk=chunk)

    assert 1 <= size <= chunk
    assert size == 1 or (rows + size - 1) // size >= min(workers, rows) // 2


@pytest.mark.parametrize(
    ("rows", "workers", "size"),
    [(256, 2, 32), (256, 8, 16), (256, 64, 4), (100, 4, 13), (8, 4, 2), (1, 4, 1)],
)
def test_the_size_of_a_lease_for_common_batches(rows: int, workers: int, size: int) -> None:
    assert lease_rows(rows, workers=workers, chunk=32) == size
