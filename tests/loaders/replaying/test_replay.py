"""A step that is made again: what it shows of its records, and results of any form."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from shardprep.formats import open_dataset
from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import ColorJitter, EvalTransform, GlobalShuffle, Loader, LocalShuffle, TrainTransform
from shardprep.loaders.transforms.decode import decode_rgb
from shardprep.loaders.transforms.geometry import ShownPart
from support.column_datasets import write_columns
from support.loaded import assert_same, crops_on, epoch_of, kept, loader_on
from support.loader_workers import Tagging, reject
from support.sampling import torture_except

TRANSFORMS = (
    None,
    TrainTransform(12),
    EvalTransform((8, 9), resize=10, dtype="float32", layout="CHW"),
)
SHUFFLES = (None, LocalShuffle(40), LocalShuffle(60, partitions=2), GlobalShuffle())


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a run that has batches."""
    world_size = draw(st.sampled_from([1, 2, 4]))
    batch_size = draw(st.sampled_from([2, 4, 6, 18]))
    return {
        "shuffle": draw(st.sampled_from(SHUFFLES)),
        "seed": draw(st.integers(0, 3)),
        "batch_size": batch_size,
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "drop_last": draw(st.booleans()),
        "transform": draw(st.sampled_from(TRANSFORMS)),
        "records": draw(st.none() | st.just(np.arange(3, 204, 2))),
        "with_numbers": draw(st.booleans()),
    }


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    run=runs(),
    before=st.integers(0, 8),
    other=st.sampled_from([2, 8]),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_a_replay_is_what_the_run_delivered(
    run: dict[str, Any],
    before: int,
    other: int,
    epoch: int,
    data: st.DataObject,
    lmdb_shards: Path,
    hdf5_shards: Path,
) -> None:
    """The run may go on after ``before`` steps of an earlier run, with another batch size."""
    path = data.draw(st.sampled_from([lmdb_shards, hdf5_shards]))
    with loader_on(path, **run | {"batch_size": other}) as loader:
        loader.set_epoch(epoch)
        taken = sum(1 for _ in islice(loader, min(before, len(loader) - 1)))
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_on(path, **run) as loader:
        if taken:
            loader.load_state_dict(state)
        else:
            loader.set_epoch(epoch)
        assume(len(loader))
        step = data.draw(st.integers(0, len(loader) - 1))
        delivered = kept(next(islice(loader, step, None)))
        start = state["place"] if taken else 0
        after = loader.state_dict()
        assert after["start"] == (start if after["epoch"] == epoch else 0)
        replayed = loader.replay(epoch, step, start=start)

    assert_same([kept(replayed.batch)], [delivered])
    own = [replayed.labels, replayed.numbers] if run["with_numbers"] else [replayed.labels]
    assert [part.tolist() for part in own] == [part.tolist() for part in delivered[-len(own) :]]


@pytest.mark.torture
def test_a_replay_is_what_workers_delivered_and_disturbs_no_iteration(lmdb_shards: Path) -> None:
    colours = TrainTransform(24, color_jitter=ColorJitter(), lighting=0.1)
    with crops_on(lmdb_shards, transform=colours, workers=2) as loader:
        expected = epoch_of(loader)
        loader.set_epoch(0)
        found, replays = [], []
        for step, batch in enumerate(loader):
            found.append(kept(batch))
            before = loader.state_dict(), loader.receipt(), loader.skipped
            replays.append(loader.replay(0, step).batch)
            assert (loader.state_dict(), loader.receipt(), loader.skipped) == before

    assert_same(found, expected)
    assert_same(replays, expected)


def undeclared(record: Any, rng: np.random.Generator) -> Any:
    """A transform that declares no outputs, and draws numbers."""
    return decode_rgb(record)[:4, :4] if rng.random() < 2 else None, rng.random(3)


def named(record: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {"some": [record.image[:5], rng.random(3)], "size": len(record.image)}


@pytest.mark.parametrize(
    "options",
    torture_except(
        [{"transform": undeclared}, {"transform": named}, {"columns": ["image", "caption"]}, {}], {}
    ),
    ids=["undeclared", "named", "columns", "all"],
)
def test_columns_and_results_of_any_form_are_replayed(options: Any, tmp_path: Path) -> None:
    write_columns(tmp_path / "columns")
    with Loader(
        tmp_path / "columns", batch_size=2, workers=0, drop_last=False, **{"seed": 3, **options}
    ) as run:
        delivered = list(run)
        replays = [run.replay(0, step).batch for step in range(len(delivered))]

        first = run.replay(0, 0)
    closed = run.replay(0, 0)

    assert list(map(repr, replays)) == list(map(repr, delivered))
    assert first.first_difference(closed) is None
    assert len(set(first.digests())) == len(first) == 2


def test_the_part_that_is_shown_is_that_of_the_pixels(lmdb_shards: Path) -> None:
    whole = TrainTransform((40, 30), interpolation="linear")
    with loader_on(lmdb_shards, transform=whole) as loader:
        replayed = loader.replay(1, 2)
        images = {
            record.key: record.image for record in map(loader.dataset.__getitem__, replayed.numbers.tolist())
        }
    for row, record in enumerate(replayed):
        assert record.shown is not None
        crop = tuple(map(int, record.shown[:4]))
        pixels = cv2.resize(decode_rgb(images[record.key], crop=crop), (30, 40))
        assert np.array_equal(replayed.batch[0][row], pixels[:, ::-1] if record.shown.is_mirrored else pixels)


def test_a_transform_may_tell_what_it_shows(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=Corner()) as loader:
        replayed = loader.replay(0, 0)
        assert_same([replayed.batch], [epoch_of(loader, 1)[0]])

    assert {record.shown[2:] for record in replayed if record.shown} == {(3, 3, True)}
    assert [record.shown[0] for record in replayed if record.shown] == replayed.batch[0].tolist()


class Corner:
    """A transform that returns the random place of what it shows."""

    def __call__(self, record: Any, rng: np.random.Generator) -> np.float64:
        return np.float64(rng.random())

    def shown(self, record: Any, rng: np.random.Generator) -> ShownPart:
        return ShownPart(rng.random(), 0, 3, 3, is_mirrored=True)


@pytest.mark.parametrize("shuffle", [None, LocalShuffle(60)])
def test_bad_records_are_told_with_their_reasons(shuffle: Any, lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        bad = {dataset.index["key"][number].decode(): reject for number in (3, *range(50, 60))}
    options = {"transform": Tagging(bad), "shuffle": shuffle}
    with loader_on(lmdb_shards, **options, on_bad_record="skip") as loader:
        delivered = epoch_of(loader)
        replays = [loader.replay(0, step) for step in range(len(delivered))]
        told = {record.key: record.skipped for each in replays for record in each.skipped}
        assert told == loader.skipped == dict.fromkeys(bad, "does not decode")
    with loader_on(lmdb_shards, **options) as loader, pytest.raises(BadImage):
        loader.replay(0, next(each.step for each in replays if each.skipped))

    assert_same([each.batch for each in replays], delivered)
    assert all(len(each.digests()) == len(each) for each in replays)


def test_a_step_that_is_not_there_is_an_error(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        with pytest.raises(IndexError, match="step 21 of 21"):
            loader.replay(0, 21)
        with pytest.raises(UsageError, match="epoch"):
            loader.replay(-1, 0)
