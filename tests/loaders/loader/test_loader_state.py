"""Stopping and resuming: at any step, with other workers, batch sizes and world sizes, exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded import Kept, assert_exactly_once, assert_same, epoch_of, loader_on, numbers_in
from loader_workers import OwnError, Tagging, fail, reject

from shardprep.formats import open_dataset
from shardprep.formats.errors import UsageError
from shardprep.loaders import GlobalShuffle, Loader, LocalShuffle, Receipt


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 2500
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def records_in(batches: list[Kept]) -> list[tuple[Any, ...]]:
    """The records that were delivered, regardless of batches."""
    return [
        tuple(np.asarray(part).tolist() for part in row)
        for batch in batches
        for row in zip(*batch, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
def test_going_on_at_any_step_equals_the_uninterrupted_run(
    lmdb_shards: Path, drop_last: bool, rank: int, world_size: int
) -> None:
    options = {"rank": rank, "world_size": world_size, "drop_last": drop_last}
    with loader_on(lmdb_shards, **options) as loader:
        states, whole = [loader.state_dict()], []
        for batch in loader:
            states.append(through_json(loader.state_dict()))
            whole += epoch_of([batch])
        receipt = loader.receipt()

    for step, state in enumerate(states[:-1]):
        with loader_on(lmdb_shards, **options) as resumed:
            resumed.load_state_dict(state)
            assert len(resumed) == len(whole) - step
            assert_same(epoch_of(resumed), whole[step:])
            assert resumed.receipt() == receipt
            assert resumed.epoch == 1


@pytest.mark.slow
def test_going_on_with_real_workers_and_then_others_is_exact(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        whole = epoch_of(loader)
        receipt = loader.receipt()
    state, parts = None, []
    for workers, steps in ((2, 3), (1, 8), (0, 2), (2, None)):
        with loader_on(lmdb_shards, workers=workers, slots=4) as loader:
            if state:
                loader.load_state_dict(state)
            parts += epoch_of(loader, steps)
            state = through_json(loader.state_dict())
            last = loader.receipt()

    assert_same(parts, whole)
    assert last == receipt
    assert (state["epoch"], state["place"]) == (1, 0)


@pytest.mark.parametrize("shuffle", [None, LocalShuffle(60), LocalShuffle("500KB"), GlobalShuffle()])
def test_another_batch_size_goes_on_with_the_same_records(lmdb_shards: Path, shuffle: Any) -> None:
    with loader_on(lmdb_shards, shuffle=shuffle) as loader:
        whole = epoch_of(loader)
        loader.set_epoch(0)
        first = epoch_of(loader, 7)
        state = through_json(loader.state_dict())
    with loader_on(lmdb_shards, shuffle=shuffle, batch_size=33) as loader:
        loader.load_state_dict(state)
        rest = epoch_of(loader)
        assert len(rest) == 5
        loader.receipt().check(204)

    assert records_in(first + rest) == records_in(whole)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_another_world_goes_on_with_the_same_records(lmdb_shards: Path, before: int, after: int) -> None:
    delivered, receipts, states = [], [], []
    for rank in range(before):
        with loader_on(lmdb_shards, rank=rank, world_size=before) as loader:
            delivered += epoch_of(loader, 4)
            states.append(through_json(loader.state_dict()))
            receipts.append(Receipt.from_json(states[-1]["receipt"]))
    for rank in range(after):
        with loader_on(lmdb_shards, rank=rank, world_size=after, batch_size=7, drop_last=True) as loader:
            loader.load_state_dict(states[0])
            delivered += epoch_of(loader)
            receipts.append(loader.receipt())

    receipt = Receipt.merge(receipts)
    receipt.check(204, left_out=(204 - 40 * before) % (7 * after))
    numbers = numbers_in(delivered)
    assert len({state["place"] for state in states}) == 1
    assert len(numbers) == len(set(numbers)) == receipt.count


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


@pytest.mark.slow
def test_after_an_early_break_the_state_is_of_what_was_delivered(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, workers=1) as loader:
        whole = epoch_of(loader)
        loader.set_epoch(0)
        first = epoch_of(loader, 4)
        assert loader.epoch == 1
        assert place_of(loader) == (0, 40)

        loader.load_state_dict(loader.state_dict())

        assert (loader.epoch, len(loader)) == (0, 17)
        assert_same(first + epoch_of(loader), whole)
        loader.receipt().check(204)


def test_setting_the_epoch_moves_the_state_there(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        epoch_of(loader, 4)
        loader.set_epoch(5)
        assert place_of(loader) == (5, 0)
        assert loader.receipt().count == 40
        loader.load_state_dict(loader.state_dict())
        assert loader.epoch == 5


def test_setting_the_epoch_within_an_epoch_does_not_disturb_it(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        for step, _ in enumerate(loader):
            if step == 3:
                loader.set_epoch(7)
            if step == 4:
                assert place_of(loader) == (0, 50)
        loader.receipt().check(204)
        assert loader.epoch == 7
        assert place_of(loader) == (7, 0)


def test_setting_the_epoch_forgets_a_state_that_was_loaded(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        epoch_of(loader, 4)
        loader.load_state_dict(loader.state_dict())
        loader.set_epoch(0)
        assert len(loader) == 21
        assert_exactly_once(loader, epoch_of(loader))


def test_a_resumed_epoch_is_followed_by_whole_ones(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        epoch_of(loader, 20)
        loader.load_state_dict(loader.state_dict())
        assert len(epoch_of(loader)) == 1
        assert len(loader) == 21
        assert_exactly_once(loader, epoch_of(loader))


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
        loader.load_state_dict(state)
        assert_same(first + epoch_of(loader), whole)


def test_loading_a_state_ends_the_iteration_under_way(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(UsageError, match="has begun"):
            next(batches)
        assert len(epoch_of(loader)) == 20
        loader.receipt().check(204)


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


def test_skipped_records_stay_in_the_receipt_of_a_resumed_epoch(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        bad = {dataset[number].key: reject for number in (3, 15, 100)}
    with loader_on(lmdb_shards, transform=Tagging(bad), on_bad_record="skip", shuffle=None) as loader:
        epoch_of(loader, 2)
        state = through_json(loader.state_dict())
    with loader_on(lmdb_shards, transform=Tagging(bad), on_bad_record="skip", shuffle=None) as loader:
        loader.load_state_dict(state)
        epoch_of(loader)
        receipt = loader.receipt()

    receipt.check(204, skipped=3)
    assert receipt.skipped == (3, 15, 100)


FOREIGN = [
    ({"seed": 1}, "another seed"),
    ({"shuffle": LocalShuffle(61)}, "another shuffle"),
    ({"shuffle": None}, "another shuffle"),
    ({"shuffle": GlobalShuffle()}, "another shuffle"),
]


@pytest.mark.parametrize(("options", "message"), FOREIGN)
def test_the_state_of_another_order_is_an_error(
    lmdb_shards: Path, options: dict[str, Any], message: str
) -> None:
    with loader_on(lmdb_shards) as loader:
        state = loader.state_dict()
    with loader_on(lmdb_shards, **options) as other, pytest.raises(UsageError, match=message):
        other.load_state_dict(state)


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
