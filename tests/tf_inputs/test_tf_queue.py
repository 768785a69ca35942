"""Queues between the source and the step: capacity, occupancy, states to resume from, batches of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Receipt, TrainTransform
from shardprep.loaders.tf_inputs import (
    DatasetInput,
    FeedInput,
    QueueInput,
    to_dataset,
)
from support.loaded import loader_on
from support.tf_members import (
    Made,
    Numbered,
    arrays,
    members,
    numbers_of,
    staging,
    staging_over_queue,
    stepping,
)

STATEFUL: dict[str, Made] = {
    "queue": QueueInput,
    "staging": staging(3),
    "staging over queue": staging_over_queue,
}


def stateful() -> Any:
    return members(STATEFUL, quick=("staging over queue",))


@stateful()
def test_an_epoch_that_was_begun_may_be_left_before_its_first_batch(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, make(loader) as each:
        for leave in (each.reset, lambda: each.load_state_dict(each.state_dict())):  # type: ignore[attr-defined]
            iter(each)
            leave()
            assert numbers_of([arrays(batch) for batch in each]) != []
            loader.receipt().check(204)


@stateful()
def test_a_graphs_state_and_a_sources_without_any_are_errors(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, make(loader) as each:
        state = each.state_dict()  # type: ignore[attr-defined]
        stepping(each)()
        for call in (each.state_dict, lambda: each.load_state_dict(state)):  # type: ignore[attr-defined]
            with pytest.raises(UsageError, match="not counted"):
                call()
    with make(Numbered()) as each:
        with pytest.raises(UsageError, match="no state"):
            each.state_dict()  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="no state"):
            each.load_state_dict(None)  # type: ignore[attr-defined]


def test_a_capacity_in_bytes_of_a_loader_is_of_its_full_batches(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=TrainTransform(32)) as loader:
        assert loader.batch_bytes == 10 * (32 * 32 * 3 + 16)
        with QueueInput(loader, capacity="1MiB") as each:
            assert each.stats().capacity == 33
    with loader_on(lmdb_shards, transform=None) as loader, pytest.raises(UsageError, match="fixed size"):
        QueueInput(loader, capacity="1MiB")


def test_inputs_that_hold_nothing_back_count_too() -> None:
    source = Numbered()
    with FeedInput(source) as feed, DatasetInput(to_dataset(source)) as dataset:
        for each in (feed, dataset):
            list(each)
            stats = each.stats()
            assert (stats.capacity, stats.level, stats.batches, stats.epochs, stats.starved) == (
                0,
                0,
                6,
                1,
                1,
            )
            assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()


@pytest.mark.parametrize("make", [QueueInput, staging_over_queue])
def test_every_record_comes_exactly_once_over_ranks(make: Made, lmdb_shards: Path) -> None:
    receipts, numbers = [], []
    for rank in range(2):
        with loader_on(lmdb_shards, rank=rank, world_size=2) as loader, make(loader) as each:
            numbers += numbers_of([arrays(batch) for batch in each])
            receipts.append(loader.receipt())

    Receipt.merge(receipts).check(204)
    assert sorted(numbers) == list(range(204))
