"""The warning of a loader over a dataset that is stored class after class."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import make_sample, open_dataset, write_dataset
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle, SortedByClass
from support.datasets import converted
from support.sampling import torture_except


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


def written(path: Path, labels: list[int]) -> Path:
    """A dataset of these labels, stored as they are given."""
    write_dataset([{"key": f"{n:05}", "label": label, "n": n} for n, label in enumerate(labels)], path)
    return path


def test_classes_that_lie_side_by_side_in_part_cause_a_warning(tmp_path: Path) -> None:
    twice = written(tmp_path / "twice", [label for _ in range(2) for label in range(20) for _ in range(50)])
    assert not open_dataset(twice).manifest.class_sorted
    made(twice, shuffle=LocalShuffle(1500))
    made(twice, shuffle=GlobalShuffle())

    with pytest.warns(
        SortedByClass, match=r"side by side: with a window of 100 .* classes, and 17 with"
    ) as told:
        made(twice, shuffle=LocalShuffle(100), batch_size=40)
    made(twice, shuffle=LocalShuffle(100))

    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.torture
def test_mixed_and_single_classes_cause_none(tmp_path: Path) -> None:
    mixed = np.random.default_rng(0).integers(0, 20, 2000).tolist()
    for name, labels in {
        "mixed": mixed,
        "turns": list(range(20)) * 50,
        "one": [0] * 500,
        "none": [-1] * 500,
    }.items():
        made(written(tmp_path / name, labels), shuffle=LocalShuffle(30))


@pytest.mark.parametrize(
    "options",
    torture_except(
        [{"drop_last": False, "batch_size": 700}, {"rank": 1, "world_size": 2}], {"rank": 1, "world_size": 2}
    ),
)
def test_the_sample_fits_any_plan(tmp_path: Path, options: dict[str, int]) -> None:
    twice = written(tmp_path / "twice", [label for _ in range(2) for label in range(20) for _ in range(25)])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made(twice, shuffle=LocalShuffle(10), **options)

    assert [one.category for one in told] == ([SortedByClass] if "rank" in options else [])
