"""What a dataset and a collection have in common: each test runs over both, of the same records."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import Dataset, open_collection, open_dataset
from shardprep.formats.shards.dataset import RecordSet
from shardprep.formats.storage import collection as collections
from support.cut_datasets import collected

Open = Callable[..., RecordSet]


@pytest.fixture(scope="module")
def folder(lmdb_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of three parts, of one, several and all other shards."""
    return collected(lmdb_shards, tmp_path_factory.mktemp("cut"), 1, 4)


@pytest.fixture(params=["dataset", "collection", "collection that reads rows"])
def opening(
    request: pytest.FixtureRequest, lmdb_shards: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    if request.param == "dataset":
        return partial(open_dataset, lmdb_shards)
    if request.param == "collection that reads rows":
        monkeypatch.setattr(collections, "MOST_INDEX_BYTES", 0)
    return partial(open_collection, folder)


@pytest.fixture
def records(opening: Open) -> Iterator[RecordSet]:
    with opening() as opened:
        yield opened


@pytest.fixture
def whole(lmdb_shards: Path) -> Iterator[Dataset]:
    with open_dataset(lmdb_shards) as opened:
        yield opened


def test_the_index_gives_rows_by_number_slice_array_and_column(records: RecordSet, whole: Dataset) -> None:
    index, numbers = records.index, np.random.default_rng(0).integers(0, 204, 500)

    assert (len(index), index.dtype) == (204, whole.index.dtype)
    assert index[numbers].tobytes() == whole.index[numbers].tobytes()
    assert index[np.array([], np.int64)].tobytes() == b""
    assert index[7:99].tobytes() == whole.index[7:99].tobytes()
    assert index[3:90:7].tobytes() == whole.index[3:90:7].tobytes()
    assert index[90:3:-7].tobytes() == whole.index[90:3:-7].tobytes()
    assert index[203] == whole.index[203]
    assert index[-1] == whole.index[-1]
    for chosen in (whole.index["label"] >= 5, numbers - 204, [203, -204, 7]):
        assert index[chosen].tobytes() == whole.index[chosen].tobytes()
    for wrong in (204, -205, np.array([0, 204]), np.ones(203, bool)):
        with pytest.raises(IndexError):
            index[wrong]
    for name in whole.index.dtype.names or ():
        assert index[name].tolist() == whole.index[name].tolist()


def test_a_copy_opens_the_same_records(records: RecordSet) -> None:
    for made in (copy.copy(records), copy.deepcopy(records)):
        with made:
            assert (made.root, made[100]) == (records.root, records[100])
