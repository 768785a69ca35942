"""The warning of a loader over a dataset that is stored class after class."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import write_dataset
from shardprep.loaders import Loader, LocalShuffle, SortedByClass
from support.sampling import torture_except


def made(path: Path, **options: object) -> None:
    Loader(path, **({"batch_size": 8, "workers": 0} | options)).close()  # type: ignore[arg-type]


def written(path: Path, labels: list[int]) -> Path:
    """A dataset of these labels, stored as they are given."""
    write_dataset([{"key": f"{n:05}", "label": label, "n": n} for n, label in enumerate(labels)], path)
    return path


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
