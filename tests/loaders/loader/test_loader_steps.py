"""Single steps of an epoch: equal to those of an iteration, in any order."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loaded import assert_same, crops_on, epoch_of, kept, loader_on
from sampling import torture_except

from shardprep.formats.errors import UsageError
from shardprep.loaders import EvalTransform, GlobalShuffle, Loader, LocalShuffle, TrainTransform
from shardprep.loaders.order.epoch import EpochPlan, EpochSteps
from shardprep.loaders.order.receipt import Tally


def epoch_at(loader: Loader, number: int) -> list[Any]:
    loader.set_epoch(number)
    return epoch_of(loader)


@pytest.mark.slow
@pytest.mark.parametrize("make", [loader_on, crops_on])
@pytest.mark.parametrize(
    "steps", torture_except([range(21), range(20, -1, -1), [3, 3, 17, 0, 3], []], [3, 3, 17, 0, 3]), ids=str
)
def test_steps_are_those_of_iteration(make: Any, steps: Any, lmdb_shards: Path) -> None:
    with make(lmdb_shards) as loader:
        expected = epoch_at(loader, 2)
        found = [(loaded.step, kept(loaded.batch)) for loaded in loader.steps(2, steps)]

    assert [step for step, _ in found] == list(steps)
    assert_same([batch for _, batch in found], [expected[step] for step in steps])


def test_the_records_of_all_steps_are_those_of_the_dataset(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, drop_last=True) as loader:
        loaded = list(loader.steps(0, range(20)))
    numbers = np.concatenate([np.concatenate([each.delivered, each.left_out]) for each in loaded])

    assert [len(each.left_out) for each in loaded] == [0] * 19 + [4]
    assert sorted(numbers.tolist()) == list(range(204))


def test_skipped_records_are_told(lmdb_shards: Path) -> None:
    options = {"transform": EvalTransform(8, resize=9), "on_bad_record": "skip"}
    with loader_on(lmdb_shards, **options) as loader:
        list(loader)
        loaded = list(loader.steps(0, range(21)))
        assert sorted(n for each in loaded for n in each.skipped.tolist()) == list(loader.receipt().skipped)


@pytest.mark.parametrize("step", [21, -1])
def test_a_step_that_the_epoch_has_not_is_an_error(step: int, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, pytest.raises(IndexError):
        list(loader.steps(0, [step]))


def test_steps_leave_iteration_and_its_state_where_they_are(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        expected = [epoch_at(loader, 0), epoch_at(loader, 1)]
        loader.set_epoch(0)
        epoch_of(loader, 5)
        before, receipt = loader.state_dict(), loader.receipt()
        list(loader.steps(4, [3, 4]))
        assert (loader.state_dict(), loader.receipt()) == (before, receipt)
        loader.load_state_dict(before)
        assert_same(epoch_of(loader), expected[0][5:])
        assert_same(epoch_of(loader), expected[1])


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


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    batch_size=st.integers(1, 12),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
    window=st.none() | st.integers(1, 50),
)
def test_every_record_is_in_one_step_or_left_out(
    counts: list[int], batch_size: int, drop_last: bool, seed: int, window: int | None
) -> None:
    assume(sum(counts) >= (batch_size if drop_last else 1))
    shuffle = LocalShuffle(window) if window else GlobalShuffle()
    plan = EpochPlan("x", tuple(counts), shuffle, seed, batch_size, 0, 1, drop_last)
    steps = EpochSteps(plan, 3)
    total = len(plan.split(0))
    batches = [next(steps.batches([step], deque())) for step in range(total)]
    told = [steps.loaded(step, (), batch, batch[:0]) for step, batch in enumerate(batches)]

    found = sum((Tally.of(each.delivered) + Tally.of(each.left_out) for each in told), Tally())
    assert found == Tally.of_dataset(sum(counts))


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
