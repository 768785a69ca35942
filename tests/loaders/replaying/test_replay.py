"""A step that is made again, and where two runs part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardprep.formats import open_dataset
from shardprep.formats.errors import BadImage
from shardprep.loaders import EvalTransform, GlobalShuffle, Loader, LocalShuffle, TrainTransform
from shardprep.loaders.loader.replay import first_parting
from shardprep.loaders.transforms.decode import decode_rgb
from support.column_datasets import write_columns
from support.loaded import assert_same, epoch_of, loader_on
from support.loader_workers import Tagging, reject
from support.sampling import torture_except


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


OPTIONS: dict[str, list[Any]] = {
    "shuffle": [LocalShuffle(60), None, LocalShuffle(204), GlobalShuffle(), LocalShuffle(60, partitions=2)],
    "seed": [0, 1],
    "batch_size": [6, 8],
    "world_size": [1, 2],
    "drop_last": [True, False],
    "labels": ["sorted_wnid0", "ilsvrc2012_id", "sorted_wnid1_bg"],
    "records": [None, np.arange(204) % 5 > 0],
    "transform": [TrainTransform(8), EvalTransform(8, resize=9), EvalTransform(8, resize=10), None],
    "with_numbers": [True, False],
}


def delivered(path: Path, run: dict[str, Any], epoch: int) -> Iterator[list[tuple[int, int]]]:
    """The record and the label of each row that an iteration without a transform delivers."""
    options = run | {"transform": None, "with_numbers": True, "rank": 0}
    with loader_on(path, **options) as loader:
        loader.set_epoch(epoch)
        for _, labels, numbers in loader:
            yield list(zip(numbers.tolist(), labels.tolist(), strict=True))


def brute_force(path: Path, one: dict[str, Any], other: dict[str, Any]) -> tuple[Any, ...] | None:
    """The first row that differs, of two epochs that were delivered, and what does."""
    for epoch in range(2):
        steps = zip_longest(delivered(path, one, epoch), delivered(path, other, epoch), fillvalue=[])
        for step, both in enumerate(steps):
            for row, (some, others) in enumerate(zip_longest(*both, fillvalue=(None, None))):
                if some[0] != others[0]:
                    return epoch, step, row, "order", (some[0], others[0])
                if some[1] != others[1]:
                    return epoch, step, row, "labels", (some[0], others[0])
                if one["with_numbers"] != other["with_numbers"]:
                    return epoch, step, row, "columns", (some[0], others[0])
                transforms = one["transform"], other["transform"]
                draws = any(isinstance(each, TrainTransform) for each in transforms)
                if transforms[0] != transforms[1] or (draws and one["seed"] != other["seed"]):
                    return epoch, step, row, "augmentation", (some[0], others[0])
    return None


@pytest.mark.torture
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_runs_part_where_their_deliveries_do(data: st.DataObject, lmdb_shards: Path) -> None:
    one = {name: data.draw(st.sampled_from(values)) for name, values in OPTIONS.items()}
    changed = data.draw(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=2))
    other = one | {name: data.draw(st.sampled_from(OPTIONS[name])) for name in changed}
    with loader_on(lmdb_shards, rank=0, **one) as some, loader_on(lmdb_shards, rank=0, **other) as others:
        found = some.parting(others, range(2))

    place = found and (found.epoch, found.step, found.row, found.kind, found.numbers)
    assert place == brute_force(lmdb_shards, one, other)
    assert found is None or set(found.because) <= changed
    assert found is None or found.because


def test_each_step_that_is_compared_is_counted(lmdb_shards: Path) -> None:
    steps: list[None] = []
    with loader_on(lmdb_shards, shuffle=None, transform=None) as one:
        other = one.order_of(one.card())
        same = first_parting(
            other, other, range(3), pixels=lambda *_: None, step_done=lambda: steps.append(None)
        )

    assert (same, len(steps)) == (None, 63)
