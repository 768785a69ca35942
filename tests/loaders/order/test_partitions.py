"""Partitions: what each rank reads, and what has no equal shares of them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import LocalShuffle
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed
from shardprep.loaders.order.parts import dealt

SHARDS = (13, 5, 0, 20, 2, 31, 9)

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


def world_sizes(partitions: int) -> list[int]:
    return [size for size in range(1, partitions + 1) if partitions % size == 0] + [2 * partitions]


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
            read = list(chain.from_iterable(Epoch(mine, epoch).batches()))
            order = mine.shards(epoch)

            allowed = [
                np.arange(a, a + n) for part in own for a, n in zip(part.firsts, part.counts, strict=True)
            ]
            assert set(read) <= set(np.concatenate(allowed).tolist())
            assert {int(shard_of[number]) for number in read} <= {
                n for part in own for n in part.shards.tolist()
            }
            assert order is None or sorted(order) == sorted({n for part in own for n in part.shards.tolist()})


def test_one_partition_is_the_order_without_partitions() -> None:
    plain, one = LocalShuffle(30), LocalShuffle(30, partitions=1)

    assert plain == one
    assert plain.to_json() == {"kind": "local", "window": 30}
    assert repr(plain) == "LocalShuffle(window=30)"


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
