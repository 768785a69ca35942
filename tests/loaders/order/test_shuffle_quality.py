"""The quality of a shuffle: against brute force, and what its sentence says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep import GlobalShuffle, Loader, LocalShuffle
from shardprep.formats.errors import UsageError
from shardprep.loaders.order.epoch import Epoch, EpochPlan
from shardprep.loaders.order.quality import ShuffleQuality, expected_classes, shuffle_quality

RECORDS, CLASSES = 60_000, 100
SHARDS = (500,) * (RECORDS // 500)
SORTED = np.arange(RECORDS) * CLASSES // RECORDS
MIXED = np.random.default_rng(1).permutation(SORTED)


def plan_of(shuffle: Any, *, shards: Sequence[int] = SHARDS, batch: int = 64, **options: Any) -> EpochPlan:
    given = {"seed": 0, "rank": 0, "world_size": 1, "drop_last": True} | options
    return EpochPlan("root", tuple(shards), shuffle, batch_size=batch, **given)


@given(labels=st.lists(st.integers(-1, 3), min_size=1, max_size=8), data=st.data())
def test_expected_classes_are_the_mean_over_all_batches(labels: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(labels)))

    every = [len(set(batch)) for batch in combinations(labels, size)]

    assert expected_classes(np.array(labels), size) == pytest.approx(np.mean(every))


@given(
    shards=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    shuffle=st.one_of(st.none(), st.just(GlobalShuffle()), st.builds(LocalShuffle, st.integers(1, 200))),
    batch=st.integers(1, 9),
    world=st.integers(1, 3),
    epoch=st.integers(0, 5),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_what_is_found_is_what_counting_finds(
    shards: list[int], shuffle: Any, batch: int, world: int, epoch: int, drop_last: bool, data: st.DataObject
) -> None:
    records = sum(shards)
    batch = min(batch, max(1, records // world))
    world = min(world, records)
    labels = data.draw(st.lists(st.integers(0, 4), min_size=records, max_size=records))
    rank = data.draw(st.integers(0, world - 1))
    plan = plan_of(shuffle, shards=shards, batch=batch, rank=rank, world_size=world, drop_last=drop_last)

    found = shuffle_quality(plan, np.array(labels), epoch)

    now, then = (
        [each.tolist() for each in Epoch(plan, number).batches() if len(each) == batch]
        for number in (epoch, epoch + 1)
    )
    counts = [len({labels[n] for n in each}) for each in now]
    assert found.batches == len(now)
    assert found.classes.found == pytest.approx(np.mean(counts))
    assert found.fewest == min(counts)
    moved = [
        abs((s * world + rank) * batch + at - n) for s, each in enumerate(now) for at, n in enumerate(each)
    ]
    assert found.displacement.mean == pytest.approx(np.mean(moved))
    later = {n: s for s, each in enumerate(then) for n in each}
    pairs = [(a, b) for each in now for a, b in pairwise(each)]
    again = [a in later and later[a] == later.get(b) for a, b in pairs]
    assert found.meet_again.found == pytest.approx(np.mean(again) if pairs else 0)
    assert found.kept.found == pytest.approx(np.mean([n in later for each in now for n in each]))
    if world == 1:
        place = {n: at for at, n in enumerate(n for each in now for n in each)}
        apart = [abs(place[n] - place[n + 1]) for n in place if n + 1 in place]
        assert (found.stored_neighbours is None) == (not apart)
        if found.stored_neighbours is not None:
            assert found.stored_neighbours.found == pytest.approx(np.mean(apart))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_full_shuffle_is_as_good_as_expected(rank: int) -> None:
    found = shuffle_quality(plan_of(GlobalShuffle(), rank=rank, world_size=4), SORTED, 0)

    assert found.is_full
    assert found.sentence.startswith("As good as a full shuffle: batches hold")
    assert abs(found.distance) < 1
    assert found.displacement.mean == pytest.approx(RECORDS / 3, rel=0.05)
    assert found.kept.found == pytest.approx(1 / 4, rel=0.05)
    assert found.meet_again.found == pytest.approx(found.meet_again.expected, abs=0.002)


def test_the_window_that_is_named_is_enough() -> None:
    shards = (60,) * 1000
    few = shuffle_quality(plan_of(LocalShuffle(500), shards=shards), SORTED, 0)

    assert few.sentence.startswith("Not well mixed: batches hold ")
    assert few.least_window is not None
    assert f"use a LocalShuffle of at least {few.least_window:,} records, GlobalShuffle()" in few.sentence
    enough = shuffle_quality(plan_of(LocalShuffle(few.least_window), shards=shards), SORTED, 0)
    assert enough.classes.found >= 0.88 * enough.classes.expected
    assert enough.least_window is None


def test_mixed_shards_need_a_window_much_larger_than_a_batch() -> None:
    small, large = (shuffle_quality(plan_of(LocalShuffle(window)), MIXED, 0) for window in (300, 30_000))

    assert "times as often as by chance; use a larger window" in small.sentence
    assert not small.is_full
    assert large.is_full


def test_partitions_are_named_where_they_make_neighbours_meet() -> None:
    plan = plan_of(LocalShuffle(30_000, partitions=4), rank=1, world_size=4)

    found = shuffle_quality(plan, MIXED, 0)

    assert found.kept.found > 0.99  # all but those after the last full batch
    assert found.sentence.endswith("use a larger window or fewer partitions.")


def test_stored_order_has_the_same_batches_in_every_epoch() -> None:
    found = shuffle_quality(plan_of(None), MIXED, 0)

    assert found.sentence.startswith("Every epoch has the same batches")
    assert found.displacement.mean == 0
    assert found.stored_neighbours is not None
    assert found.stored_neighbours.found == 1


def test_an_epoch_without_a_full_batch_has_no_quality() -> None:
    with pytest.raises(UsageError, match="no full batch of 64 records"):
        shuffle_quality(plan_of(None, shards=(10,), drop_last=False), np.zeros(10, int), 0)


def test_a_loader_measures_its_subset_without_reading(lmdb_shards: Path) -> None:
    with Loader(
        lmdb_shards, batch_size=8, records=np.arange(20, 120), shuffle=GlobalShuffle(), workers=0
    ) as loader:
        found = loader.shuffle_quality(epoch=3)
        labels = loader.dataset.index["label"][20:120]

        assert isinstance(found, ShuffleQuality)
        assert (found.records, found.batches) == (100, 12)
        assert found.classes.expected == expected_classes(labels, 8)
        assert found != loader.shuffle_quality(epoch=4)
        assert json.loads(json.dumps(found.to_json()))["sentence"] == str(found)
        assert not loader.stats().batches
