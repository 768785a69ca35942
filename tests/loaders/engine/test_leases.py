"""Leases: every row once, in order, however workers start and end; the bookkeeping alone."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.loaders.engine.leases import (
    LEASES_PER_WORKER,
    MAX_ROW_FAILURES,
    LeasedBatch,
    Leases,
    RowFailure,
)

NOTHING = memoryview(bytes(4))


def leases(*, slots: int = 2, workers: int = 2, chunk: int = 4) -> Leases:
    made = Leases(slots=slots, workers=workers, chunk=chunk)
    made.begin(1)
    return made


def rows_of(batch: LeasedBatch) -> list[int]:
    done = [row for part in batch.outcomes for row in range(part.first, part.first + part.count)]
    return sorted([*done, *batch.left_out])


class Game:
    """A simulated consumer and workers, driven by a list of numbers, each a move."""

    def __init__(self, plans: list[int], *, slots: int, workers: int, chunk: int) -> None:
        self.plans = [np.arange(rows) for rows in plans]
        self.workers = workers
        self.leases = leases(slots=slots, workers=workers, chunk=chunk)
        self.held: list[list[int]] = [[] for _ in range(workers)]
        self.out: list[LeasedBatch] = []
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


def test_a_row_that_ends_three_workers_fails_its_batch_but_not_the_one_before() -> None:
    table = leases(workers=2, chunk=2)
    table.open(np.arange(1))
    table.open(np.arange(4))
    first = table.take(0)
    for _ in range(MAX_ROW_FAILURES):
        poison = table.take(1)
        assert first is not None
        assert poison is not None
        table.lose(1, poison.id, 1, "SIGSEGV")
    assert table.take(1) is table.deliver() is None
    table.finish(0, first.id, NOTHING)
    batches = table.deliver(), table.deliver()
    assert [batch and batch.failure for batch in batches] == [None, RowFailure(1, cause="SIGSEGV")]


@pytest.mark.parametrize("row", [0, 2, 4])
def test_a_row_that_only_crashes_workers_may_be_left_out_of_its_batch(row: int) -> None:
    table = Leases(slots=1, workers=2, chunk=5, skip_causes={"SIGSEGV"})
    table.begin(1)
    table.open(np.arange(20))

    for _ in range(MAX_ROW_FAILURES):  # of a worker that has the lease behind it, too
        poison, other = table.take(0), table.take(0)
        assert poison is not None
        assert other is not None
        table.lose(0, poison.id, row, "SIGSEGV")
    left = []
    while (lease := table.take(0)) is not None:
        left += lease.items.tolist()
        table.finish(0, lease.id, NOTHING)
    batch = table.deliver()

    assert sorted(left) == [n for n in range(20) if n != poison.items[row]]
    assert batch is not None
    assert batch.failure is None
    assert rows_of(batch) == list(range(20))
    assert batch.left_out == {poison.first + row: "its workers crashed by SIGSEGV"}
