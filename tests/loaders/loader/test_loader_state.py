"""States of a loader: what they are made of, and which are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import (
    EvalTransform,
    Loader,
    TrainTransform,
    TransformInput,
)
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on, numbers_in
from support.loader_workers import OwnError, Tagging, fail, reject
from support.repository import SUPPORT


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 2500
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@pytest.mark.slow
def test_an_error_in_the_middle_leaves_a_state_to_go_on_from(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as sound:
        whole = epoch_of(sound)
        key = sound.key(numbers_in(whole)[57])
    with loader_on(lmdb_shards, transform=Tagging({key: fail}), workers=1) as loader:
        batches = iter(loader)
        first = epoch_of(batches, 5)
        with pytest.raises(OwnError):
            next(batches)
        state = loader.state_dict()
        assert loader.receipt().count == state["place"] == 50
        assert loader.epoch == 1

    with loader_on(lmdb_shards) as loader:
        loader.load_state_dict(state, transform="changed")  # the one that failed was mended
        assert_same(first + epoch_of(loader), whole)


def test_the_state_before_the_first_and_after_the_last_batch_is_the_start_of_an_epoch(
    lmdb_shards: Path,
) -> None:
    with loader_on(lmdb_shards) as loader:
        assert place_of(loader) == (0, 0)
        batches = iter(loader)
        assert place_of(loader) == (0, 0)
        for step, _ in enumerate(batches, start=1):
            assert place_of(loader) == ((0, step * 10) if step < 21 else (1, 0))
        assert place_of(loader) == (1, 0)
        assert loader.receipt().count == 204

        loader.load_state_dict(loader.state_dict())

        assert (loader.epoch, len(loader), place_of(loader)) == (1, 21, (1, 0))
        assert loader.receipt().count == 0
        assert_exactly_once(loader, epoch_of(loader))


def place_of(loader: Loader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["place"]


@pytest.mark.parametrize(("rank", "left"), [(0, 1), (3, 1), (4, 0), (199, 0)])
def test_a_rank_without_a_share_of_the_rest_goes_on_in_step_with_the_others(
    lmdb_shards: Path, rank: int, left: int
) -> None:
    with loader_on(lmdb_shards, rank=rank, world_size=200, batch_size=1) as loader:  # one step, and 4 records
        next(iter(loader))
        assert place_of(loader) == (0, 200)

        loader.load_state_dict(loader.state_dict())

        assert len(loader) == left
        assert len(epoch_of(loader)) == left
        assert place_of(loader) == (1, 0)


def test_the_state_is_plain_json_whatever_numbers_the_loader_was_given(lmdb_shards: Path) -> None:
    numbers = {"seed": np.int64(3), "batch_size": np.int32(10), "rank": np.int64(0), "world_size": np.int8(1)}
    with loader_on(lmdb_shards, **numbers) as loader:
        loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
        epoch_of(loader, 3)
        state = through_json(loader.state_dict())

    assert {type(state[name]) for name in ("seed", "epoch", "place", "rank", "world_size")} == {int}


def test_the_state_of_another_dataset_is_an_error_and_changes_nothing(
    lmdb_shards: Path, hdf5_shards: Path
) -> None:
    with loader_on(lmdb_shards) as loader, loader_on(hdf5_shards) as other:
        epoch_of(other, 3)
        before = other.state_dict()
        for state in (loader.state_dict(), {}, None, "state"):
            with pytest.raises(UsageError):
                other.load_state_dict(state)  # type: ignore[arg-type]
        assert other.state_dict() == before
        assert other.epoch == 1


def lengths(record: TransformInput, rng: np.random.Generator) -> int:
    return len(record.image)


def doubled(record: TransformInput, rng: np.random.Generator) -> int:
    return 2 * len(record.image)


def same_name(source: str) -> Any:
    return eval(f"lambda record, rng: {source}")  # noqa: S307 - of this file


OTHER_TRANSFORMS: list[tuple[Any, Any, str]] = [
    (
        TrainTransform(32),
        TrainTransform(48, flip=False),
        r"\(size=32, flip=true\) .* \(size=48, flip=false\)",
    ),
    (TrainTransform(32), EvalTransform(32), "TrainTransform where this one has EvalTransform"),
    (TrainTransform(32), None, "TrainTransform where this one has none"),
    (None, lengths, "none where this one has lengths"),
    (lengths, doubled, "lengths where this one has doubled"),
    (Tagging(), Tagging({"a key": fail}), "Tagging of other values"),
    (partial(lengths, rng=1), partial(lengths, rng=2), "partial of other values"),
    (same_name("1"), same_name("2"), "<lambda> of other code"),
]


@pytest.mark.parametrize(
    ("before", "after", "message"), OTHER_TRANSFORMS, ids=[each[2] for each in OTHER_TRANSFORMS]
)
def test_the_state_of_another_transform_is_an_error_unless_it_may_have_changed(
    lmdb_shards: Path, before: Any, after: Any, message: str
) -> None:
    with loader_on(lmdb_shards, transform=before) as loader:
        state = through_json(loader.state_dict())
        loader.load_state_dict(state)
    older = {name: state[name] for name in state if name != "transform"}
    of_another_python = state | {"transform": (state["transform"] or {}) | {"python": "3.99"}}
    with loader_on(lmdb_shards, transform=after) as other:
        with pytest.raises(UsageError, match=message.replace(" .* ", f".*{type(after).__name__}")):
            other.load_state_dict(state)
        other.load_state_dict(state, transform="changed")
        other.load_state_dict(older)
        if "code" in message:
            other.load_state_dict(of_another_python)
        with pytest.raises(UsageError, match="'same' or 'changed', not 'other'"):
            other.load_state_dict(state, transform="other")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_transform_is_the_same_one_in_another_process_and_after_it_was_used(lmdb_shards: Path) -> None:
    program = (
        "import json, sys; from support.loaded import loader_on; from support.loader_workers import Tagging, reject\n"
        "loader = loader_on(sys.argv[1], transform=Tagging({'a': reject, 'b': print})); next(iter(loader))\n"
        "print(json.dumps(loader.state_dict()))"
    )
    command = [sys.executable, "-c", program, str(lmdb_shards)]
    environ = os.environ | {"PYTHONPATH": SUPPORT, "PYTHONHASHSEED": "7"}
    there = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=120).stdout
    with loader_on(lmdb_shards, transform=Tagging({"a": reject, "b": print})) as loader:
        loader.load_state_dict(json.loads(there))
        assert loader.state_dict()["transform"] == json.loads(there)["transform"]
