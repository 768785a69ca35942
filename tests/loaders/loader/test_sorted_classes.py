"""The warning of a loader over a dataset that is stored class after class."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import converted

from shardprep.formats import make_sample
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle, SortedByClass


@pytest.fixture(scope="module")
def by_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of 20 classes, class after class."""
    folder = tmp_path_factory.mktemp("by-class")
    make_sample(folder / "archives", classes=20, train_per_class=2, val=1, test=1)
    converted(folder / "archives", folder / "lmdb", order="key", shard_size=2_000_000)
    return folder / "lmdb"


def made(path: Path, **options: object) -> None:
    Loader(path, **({"batch_size": 8, "workers": 0} | options)).close()  # type: ignore[arg-type]


def test_a_dataset_sorted_by_class_and_a_small_window_cause_one_warning(by_class: Path) -> None:
    made(by_class)
    made(by_class, shuffle=GlobalShuffle())
    made(by_class, shuffle=LocalShuffle(40))
    made(by_class, shuffle=LocalShuffle(3), batch_size=1)
    Flow.from_dataset(by_class, shuffle=LocalShuffle(3))

    with pytest.warns(
        SortedByClass, match=r"window of 3 records.* about 4 of 20 classes, and 7 with"
    ) as told:
        made(by_class, shuffle=LocalShuffle(3))
    made(by_class, shuffle=LocalShuffle(3))

    (warning,) = told
    assert warning.filename == __file__
    assert str(by_class) in str(warning.message)
    assert "GlobalShuffle(). Use that, or" in str(warning.message)


def test_a_shuffled_dataset_is_read_through_any_window_without_a_warning(lmdb_shards: Path) -> None:
    made(lmdb_shards, shuffle=LocalShuffle(3))
