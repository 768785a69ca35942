"""Single steps of an epoch, and the identity that says whether they are equal."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import LocalShuffle, TrainTransform
from support.loaded import crops_on, loader_on


@pytest.mark.slow
def test_steps_are_drawn_no_further_ahead_than_the_slots_allow(lmdb_shards: Path) -> None:
    drawn = []

    def steps() -> Any:
        for step in range(21):
            drawn.append(step)
            yield step

    with crops_on(lmdb_shards, slots=4) as loader:
        for number, _ in enumerate(loader.steps(0, steps())):
            assert len(drawn) <= number + 1 + 2 * 4


OTHERS: dict[str, dict[str, Any]] = {
    "batch size": {"batch_size": 9},
    "seed": {"seed": 1},
    "shuffle": {"shuffle": LocalShuffle(61)},
    "transform": {"transform": TrainTransform(24)},
    "drop_last": {"drop_last": True},
    "labels": {"labels": "sorted_wnid1_bg"},
    "record numbers": {"with_numbers": False},
    "bad records": {"on_bad_record": "skip"},
    "rank": {"rank": 1, "world_size": 2},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_identity_names_what_decides_the_batches(name: str, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as one, loader_on(lmdb_shards, **OTHERS[name]) as other:
        differing = {n for n in one.identity if one.identity[n] != other.identity.get(n)}
    assert name in differing
    assert differing <= {name, "OpenCV"}


def test_workers_and_where_the_data_lie_are_not_in_the_identity(lmdb_shards: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(lmdb_shards)
    with loader_on(lmdb_shards) as one, loader_on(tmp_path / "elsewhere", workers=1, slots=5) as other:
        assert one.identity == other.identity


def test_containers_differ_in_the_dataset_only(lmdb_shards: Path, hdf5_shards: Path) -> None:
    with loader_on(lmdb_shards) as one, loader_on(hdf5_shards) as other:
        assert {n for n in one.identity if one.identity[n] != other.identity[n]} == {"dataset"}


def test_a_transform_that_cannot_be_compared_has_no_identity(lmdb_shards: Path) -> None:
    lock = threading.Lock()

    def transform(record: Any, rng: Any) -> Any:
        with lock:
            return np.zeros(1)

    with loader_on(lmdb_shards, transform=transform) as loader, pytest.raises(UsageError, match="identity="):
        loader.identity  # noqa: B018
