"""A step that is made again: what it shows of its records, and results of any form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import BadImage
from shardprep.loaders import Loader, LocalShuffle
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
