"""What a dataset and a collection have in common: each test runs over both, of the same records."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import Dataset, UsageError, open_collection, open_dataset
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


def test_records_are_numbered_in_stored_order(records: RecordSet, whole: Dataset) -> None:
    assert len(records) == len(whole) == 204
    assert list(records) == list(whole)
    assert [records[n] for n in (0, 20, 60, 203, -1, -204)] == [whole[n] for n in (0, 20, 60, 203, -1, -204)]
    for number in (204, -205):
        with pytest.raises(IndexError, match="of 204"):
            records[number]


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


def test_what_a_loader_plans_with_is_that_of_the_whole(records: RecordSet, whole: Dataset) -> None:
    assert records.space == whole.space
    assert (records.classes, records.schema) == (whole.classes, whole.schema)
    assert (records.image_bytes, records.class_sorted) == (whole.image_bytes, whole.class_sorted)
    assert [b[1:] for b in records.blocks] == [b[1:] for b in whole.blocks]
    for block, file in zip(records.blocks, whole.image_files, strict=True):
        assert (records.path / block.name).samefile(file)
    assert sum(part.manifest.records for part in records.parts) == 204
    assert [part.first_record for part in records.parts] == [part.records.start for part in records.parts]


def test_labels_are_of_the_space_that_was_asked_for(opening: Open) -> None:
    with opening(labels="sorted_wnid1_bg") as records:
        assert {record.label for record in records} == {1, 2, 3, 4}
    with pytest.raises(UsageError, match="unknown label space"):
        opening(labels="other")


def test_a_copy_opens_the_same_records(records: RecordSet) -> None:
    for made in (copy.copy(records), copy.deepcopy(records)):
        with made:
            assert (made.root, made[100]) == (records.root, records[100])


def test_closing_lets_go_and_the_next_read_opens_again(records: RecordSet) -> None:
    before = records[100]
    records.close()
    records.close()

    assert records[100] == before
