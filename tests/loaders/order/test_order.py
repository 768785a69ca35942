"""Properties of an epoch's order: its blocks, partitions and weights, and what none of them takes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.order import parts as partition_module
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle, Shuffle, epoch_order
from shardprep.loaders.order.parts import MAX_RECORDS, WeightedParts, shared_out
from shardprep.loaders.order.rng import Purpose, keyed_bits
from support.whole_order import whole_order

shard_counts = st.lists(st.integers(0, 60), max_size=8)
shuffles = (
    st.none() | st.just(GlobalShuffle()) | st.builds(LocalShuffle, st.integers(1, 500), st.integers(1, 6))
)
words = st.integers(0, (1 << 64) - 1)
blocks = st.integers(1, 100)  # places in one, so that there are many


@given(
    counts=shard_counts,
    shuffle=shuffles,
    seed=words,
    epoch=words,
    block=blocks,
    ends=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=12),
    data=st.data(),
)
def test_every_range_and_every_place_is_that_of_the_whole_order(
    counts: list[int],
    shuffle: Shuffle | None,
    seed: int,
    epoch: int,
    block: int,
    ends: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    expected = whole_order(counts, shuffle=shuffle, seed=seed, epoch=epoch)
    with patch.object(partition_module, "BLOCK", block):
        order = epoch_order(counts, shuffle=shuffle, seed=seed, epoch=epoch)
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=30)) if len(expected) else []

    assert len(order) == len(expected)
    for start, stop in ends:  # of one order, whose blocks come and go
        np.testing.assert_array_equal(order[start:stop], expected[start:stop], strict=True)
    assert list(order.each(places)) == expected[places].tolist()


def test_a_stream_is_the_same_as_ever():
    bits = keyed_bits(Purpose.AUGMENTATION, seed=3, epoch=4, item=7)

    assert bits.random_raw(2).tolist() == [3194593376199455426, 9954605077941752896]


# What is refused


@pytest.mark.parametrize("window", [0, -1, "2 gigs", "GiB", "-1GiB", "0MB", ""])
def test_a_window_that_means_nothing_is_refused(window):
    with pytest.raises(UsageError, match="window"):
        LocalShuffle(window)


def test_a_window_of_bytes_of_unknown_size_and_too_many_records_are_refused() -> None:
    with pytest.raises(UsageError, match="in_records"):
        epoch_order([10], shuffle=LocalShuffle("1KB"), seed=0, epoch=0)[:]
    with pytest.raises(UsageError, match="more than"):
        epoch_order([MAX_RECORDS, 1], shuffle=None, seed=0, epoch=0)


# Partitions


def partitioned(rank: int, world_size: int, **options: Any) -> EpochPlan:
    defaults = {
        "dataset": "sha256:abc",
        "shard_counts": (13, 5, 0, 20, 2, 31, 9),
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
            partitioned(rank, world_size, **options)


@pytest.mark.parametrize("partitions", [0, -1, 1.5, "2", None])
def test_a_number_of_partitions_that_means_nothing_is_refused(partitions: Any) -> None:
    with pytest.raises(UsageError, match="partitions must be at least 1"):
        LocalShuffle(10, partitions=partitions)


# Weights


RECORDS = st.lists(st.integers(1, 60), min_size=1, max_size=5)
WEIGHTS = st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3))


@st.composite
def weighted(draw: st.DrawFn) -> WeightedParts:
    records = draw(RECORDS)
    names = [f"part-{number}" for number in range(len(records))]
    weights = {name: draw(WEIGHTS) for name in names}
    shares = [Fraction(weight) for weight in weights.values()]
    assume(all(shared_out(sum(records), shares)))
    return WeightedParts.of(weights, names, records)


@given(weighted(), st.integers(0, 1 << 63))
def test_each_part_has_its_places_of_an_epoch_and_no_record_comes_twice_as_often(
    parts: WeightedParts, epoch: int
) -> None:
    found = parts.positions(np.arange(sum(parts.places)), epoch)

    counts = np.bincount(found, minlength=sum(parts.records))
    for own, places in zip(np.split(counts, np.cumsum(parts.records)[:-1]), parts.places, strict=True):
        assert own.sum() == places
        assert own.max() - own.min() <= 1


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (0.5, "a dict with one number for each of a, b"),
        ({"a": 1}, "one number for each of a, b"),
        ({"a": 1, "b": 1, "c": 1}, "one number for each of a, b"),
        ({"a": 1, "b": 0}, "weight of b must be a number above 0, not 0"),
        ({"a": 1, "b": -1.0}, "weight of b"),
        ({"a": float("nan"), "b": 1}, "weight of a"),
        ({"a": float("inf"), "b": 1}, "weight of a"),
        ({"a": True, "b": 1}, "weight of a"),
        ({"a": "1", "b": 1}, "weight of a"),
        ({"a": 1e9, "b": 1}, "no place in an epoch for b, which has 20"),
    ],
)
def test_other_weights_are_refused(weights: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        WeightedParts.of(weights, ["a", "b"], [10, 20])
