"""Partitions: what each rank reads, and that the global steps are the same for any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import LocalShuffle, Receipt
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed
from shardprep.loaders.order.epoch_order import epoch_order
from shardprep.loaders.order.partitions import dealt

SHARDS = (13, 5, 0, 20, 2, 31, 9)
RECORDS = sum(SHARDS)

shard_counts = st.lists(st.integers(0, 30), min_size=1, max_size=8).map(tuple)
windows = st.integers(1, 120)


def plan(rank: int, world_size: int, **options: Any) -> EpochPlan:
    defaults = {
        "dataset": "sha256:abc",
        "shard_counts": SHARDS,
        "shuffle": LocalShuffle(24, partitions=4),
        "seed": 7,
        "batch_size": 4,
        "drop_last": False,
    }
    return EpochPlan(**(defaults | options), rank=rank, world_size=world_size)


def epochs(world_size: int, number: int = 1, **options: Any) -> list[Epoch]:
    return [Epoch(plan(rank, world_size, **options), number) for rank in range(world_size)]


def run(epoch: Epoch, steps: int | None = None) -> list[list[int]]:
    batches = [batch for step, batch in enumerate(epoch.batches()) if steps is None or step < steps]
    for batch in batches:
        epoch.delivered(batch, [])
    if steps is None:
        epoch.end()
    return [batch.tolist() for batch in batches]


def world_sizes(partitions: int) -> list[int]:
    return [size for size in range(1, partitions + 1) if partitions % size == 0] + [2 * partitions]


def side_by_side(batches: list[list[list[int]]]) -> list[list[int]]:
    """The records of each global step: the batches of all ranks, one after the other."""
    return [flat(ranks) for ranks in zip_longest(*batches, fillvalue=[])]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


@given(
    counts=shard_counts,
    partitions=st.integers(1, 6),
    window=windows,
    share=st.integers(1, 4),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
)
def test_global_steps_are_the_same_for_any_number_of_ranks_and_have_every_record_once(
    counts: tuple[int, ...], partitions: int, window: int, share: int, drop_last: bool, seed: int
) -> None:
    step = 2 * partitions * share  # a batch of any of these ranks has whole shares
    assume(sum(counts) >= step)
    options = {
        "shard_counts": counts,
        "shuffle": LocalShuffle(window, partitions),
        "drop_last": drop_last,
        "seed": seed,
    }
    left_out = sum(counts) % step if drop_last else 0
    steps = []
    for world_size in world_sizes(partitions):
        ranks = epochs(world_size, batch_size=step // world_size, **options)
        batches = [run(epoch) for epoch in ranks]
        Receipt.merge(epoch.receipt for epoch in ranks).check(sum(counts), left_out=left_out)
        assert [len(epoch) for epoch in ranks] == [len(part) for part in batches]
        assert all(len(batch) == step // world_size for part in batches for batch in part[:-1])
        assert all(epoch.is_over for epoch in ranks)
        steps.append(side_by_side(batches))

    delivered = flat(steps[0])
    assert steps == [steps[0]] * len(steps)
    assert len(set(delivered)) == len(delivered) == sum(counts) - left_out


@given(counts=shard_counts, partitions=st.integers(2, 6), window=windows, epoch=st.integers(0, 3))
def test_a_rank_reads_only_its_partitions_whatever_the_seed_and_the_epoch(
    counts: tuple[int, ...], partitions: int, window: int, epoch: int
) -> None:
    assume(sum(counts) >= 2 * partitions)
    shard_of = np.repeat(np.arange(len(counts)), counts)
    for world_size in world_sizes(partitions):
        options = {"batch_size": partitions, "shard_counts": counts}
        for rank in range(world_size):
            mine = plan(rank, world_size, shuffle=LocalShuffle(window, partitions), seed=epoch, **options)
            own = [dealt(counts, partitions)[number] for number in mine.split(0).partitions]
            read = flat(run(Epoch(mine, epoch)))
            order = mine.shards(epoch)

            allowed = [
                np.arange(a, a + n) for part in own for a, n in zip(part.firsts, part.counts, strict=True)
            ]
            assert set(read) <= set(np.concatenate(allowed).tolist())
            assert {int(shard_of[number]) for number in read} <= {
                n for part in own for n in part.shards.tolist()
            }
            assert order is None or sorted(order) == sorted({n for part in own for n in part.shards.tolist()})


@given(counts=shard_counts, partitions=st.integers(1, 6))
def test_partitions_have_every_record_once_and_differ_by_one_record_at_most(
    counts: tuple[int, ...], partitions: int
) -> None:
    parts = dealt(counts, partitions)
    runs = [np.arange(a, a + n) for part in parts for a, n in zip(part.firsts, part.counts, strict=True)]
    sizes = [part.records for part in parts]
    owners = sorted(shard for part in parts for shard, n in zip(part.shards, part.counts, strict=True) if n)

    assert sorted(np.concatenate([np.empty(0, int), *runs])) == list(range(sum(counts)))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert len(owners) - len(set(owners)) <= partitions - 1  # shards that are in two


@given(
    window=windows,
    world=st.sampled_from([1, 2, 4, 8]),
    later=st.sampled_from([1, 2, 4, 8]),
    steps=st.integers(0, 12),
    share=st.integers(1, 3),
    later_share=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_an_epoch_goes_on_exactly_with_another_number_of_ranks_and_another_batch_size(
    window: int, world: int, later: int, steps: int, share: int, later_share: int, drop_last: bool
) -> None:
    options = {"shuffle": LocalShuffle(window, partitions=4), "drop_last": drop_last}
    before = epochs(world, batch_size=8 * share // world, **options)
    done = [run(epoch, steps) for epoch in before]
    state = json.loads(json.dumps(before[0].state()))
    after = [
        resumed(plan(rank, later, batch_size=8 * later_share // later, **options), state)
        for rank in range(later)
    ]
    rest = [run(epoch) for epoch in after]

    order, place = before[0].plan.order(1)[:].tolist(), state["place"]
    left_out = (RECORDS - place) % (8 * later_share) if drop_last else 0
    assert sorted(flat(side_by_side(done))) == sorted(order[:place])
    assert sorted(flat(side_by_side(rest))) == sorted(order[place : RECORDS - left_out])
    parts = [*(before[1:] if world == later else before), *after]
    if not before[0].is_over:
        Receipt.merge(epoch.receipt for epoch in parts).check(RECORDS, left_out=left_out)


def test_one_partition_is_the_order_without_partitions() -> None:
    plain, one = LocalShuffle(30), LocalShuffle(30, partitions=1)

    assert plain == one
    assert plain.to_json() == {"kind": "local", "window": 30}
    assert repr(plain) == "LocalShuffle(window=30)"


def test_the_order_in_partitions_is_the_same_as_ever() -> None:
    order = epoch_order([4, 4, 4], shuffle=LocalShuffle(6, partitions=2), seed=7, epoch=1)[:]

    assert order.tolist() == [1, 2, 0, 3, 8, 4, 9, 5, 10, 6, 11, 7]


def test_an_order_in_partitions_takes_a_record_of_each_in_turn() -> None:
    shuffle = LocalShuffle(24, partitions=4)
    order = epoch_order(SHARDS, shuffle=shuffle, seed=0, epoch=0)
    parts = dealt(SHARDS, 4)
    partition_of = {
        number: part.number
        for part in parts
        for first, count in zip(part.firsts, part.counts, strict=True)
        for number in range(first, first + count)
    }

    assert [partition_of[number] for number in order[:].tolist()] == [place % 4 for place in range(RECORDS)]
    assert list(order.each(range(RECORDS))) == order[:].tolist()
    assert order[5:23].tolist() == order[:][5:23].tolist()


WRONG: list[tuple[int, dict[str, Any], str]] = [
    (3, {}, "world_size of 1, 2 or a multiple of 4"),
    (6, {}, "world_size of 1, 2 or a multiple of 4"),
    (2, {"batch_size": 5}, "use 4 or 6"),
    (1, {"batch_size": 2}, "use 4$"),
    (1, {"shard_counts": (3,)}, "3 records are too few for 4 partitions"),
]


@pytest.mark.parametrize(("world_size", "options", "message"), WRONG)
def test_ranks_and_batches_that_have_no_equal_share_of_the_partitions_are_errors(
    world_size: int, options: dict[str, Any], message: str
) -> None:
    for rank in range(world_size):
        with pytest.raises(UsageError, match=message):
            plan(rank, world_size, **options)


@pytest.mark.parametrize("partitions", [0, -1, 1.5, "2", None])
def test_a_number_of_partitions_that_means_nothing_is_refused(partitions: Any) -> None:
    with pytest.raises(UsageError, match="partitions must be at least 1"):
        LocalShuffle(10, partitions=partitions)


def test_the_state_of_other_partitions_is_refused() -> None:
    state = Epoch(plan(0, 2), 0).state()

    with pytest.raises(UsageError, match="another shuffle"):
        resumed(plan(0, 2, shuffle=LocalShuffle(24, partitions=2)), state)
