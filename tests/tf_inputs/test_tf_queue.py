"""Queues between the source and the step: capacity, occupancy, states to resume from, batches of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import TrainTransform, TransformInput
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
stateful = members(STATEFUL, quick=("staging over queue",))


@stateful
def test_an_epoch_that_was_begun_may_be_left_before_its_first_batch(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, make(loader) as each:
        for leave in (each.reset, lambda: each.load_state_dict(each.state_dict())):  # type: ignore[attr-defined]
            iter(each)
            leave()
            assert numbers_of([arrays(batch) for batch in each]) != []
            loader.receipt().check(204)


@stateful
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


def image(record: TransformInput, rng: np.random.Generator) -> Any:
    return np.full((4, 5, 3), record.label, np.float32)


def of_any_size(record: TransformInput, rng: np.random.Generator) -> Any:
    return np.zeros(rng.integers(1, 9))


@pytest.mark.parametrize(
    ("transform", "row"),
    [(TrainTransform(32), 32 * 32 * 3), (image, 4 * 5 * 3 * 4)],
    ids=["declared", "found"],
)
def test_a_capacity_in_bytes_of_a_loader_is_of_its_full_batches(
    lmdb_shards: Path, transform: Any, row: int
) -> None:
    with loader_on(lmdb_shards, transform=transform) as loader:
        with QueueInput(loader, capacity=f"{3 * 10 * (row + 16)} B") as each:
            assert each.stats().capacity == 3
            assert len(numbers_of([arrays(batch) for batch in each])) == 204
        assert loader.batch_bytes == 10 * (row + 16) or transform is image


@pytest.mark.parametrize(
    ("transform", "says"), [(None, "fixed size"), (of_any_size, r"pad or crop .* to one shape")]
)
def test_batches_of_no_fixed_size_have_no_capacity_in_bytes(
    lmdb_shards: Path, transform: Any, says: str
) -> None:
    with loader_on(lmdb_shards, transform=transform) as loader, pytest.raises(UsageError, match=says):
        QueueInput(loader, capacity="1MiB")


def test_inputs_that_hold_nothing_back_count_too() -> None:
    source = Numbered()
    with FeedInput(source) as feed, DatasetInput(to_dataset(source)) as dataset:
        for each in (feed, dataset):
            list(each)
            stats = each.stats()
            assert (stats.capacity, stats.level, stats.batches) == (0, 0, 6)
            assert (stats.epochs, stats.starved) == (1, 1)
            assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
