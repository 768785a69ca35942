"""Partitions: what each rank reads, and what has no equal shares of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import LocalShuffle
from shardprep.loaders.order.epoch import EpochPlan

SHARDS = (13, 5, 0, 20, 2, 31, 9)

shard_counts = st.lists(st.integers(0, 30), min_size=1, max_size=8).map(tuple)


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
