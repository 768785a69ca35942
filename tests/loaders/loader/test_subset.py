"""A loader of a part of a dataset: what chooses it, and what it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader
from support.loaded import loader_on

RECORDS = 204


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": [3, 5, 3]}, "has 3 more than once"),
        ({"records": [0, RECORDS]}, f"has {RECORDS}; record numbers of this dataset are 0 to {RECORDS - 1}"),
        ({"records": [-1]}, "has -1; record numbers"),
        ({"records": []}, "select no record"),
        ({"records": [False] * RECORDS}, "select no record"),
        ({"records": [True] * 10}, f"a mask of 10 records; the dataset has {RECORDS}"),
        ({"records": [0.5, 1.0]}, "not an array of float64"),
        ({"records": [[1], [2]]}, r"of shape \(2, 1\)"),
        ({"records": "7"}, "must be a boolean mask"),
        ({"records": {1, 2}}, "must be a boolean mask"),
        ({"records": 7}, "must be a boolean mask"),
        ({"records": np.ma.array([True] * RECORDS, mask=True)}, r"fill it, with mask.filled\(False\)"),
        ({"classes": []}, "select no record"),
        ({"classes": "n01440764"}, "must be a list of class names or labels"),
        ({"classes": 3}, "must be a list of class names or labels"),
        ({"classes": ["dog"]}, r"no class 'dog'; its classes are n\d+, .* labels \(sorted_wnid0\) 0 to 3"),
        ({"classes": [4]}, "no class 4"),
        ({"classes": [-1]}, "no class -1"),
        ({"classes": [[1]]}, r"no class \[1\]"),
        ({"records": [0], "classes": []}, "select no record"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_an_error(
    lmdb_shards: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        loader_on(lmdb_shards, **options)


def test_sizes_in_bytes_are_of_the_chosen_records(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, records=[5], workers=0, batch_size=1) as loader:
        assert loader.stats().image_bytes == loader.dataset.index["length"][5]
