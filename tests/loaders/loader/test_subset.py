"""A loader of a part of a dataset: what chooses it, and what it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, LocalShuffle, Receipt
from support.loaded import epoch_of, loader_on, numbers_in
from support.loader_workers import Tagging, reject

RECORDS = 204


def test_a_split_in_two_covers_the_dataset(lmdb_shards: Path) -> None:
    held_out = np.random.default_rng(0).random(RECORDS) < 0.2
    with (
        loader_on(lmdb_shards, records=~held_out) as train,
        loader_on(lmdb_shards, records=held_out) as val,
    ):
        numbers = numbers_in(epoch_of(train)), numbers_in(epoch_of(val))
        train.receipt().check(len(train.records))
        val.receipt().check(len(val.records))
        with pytest.raises(UsageError, match="agree on dataset"):
            Receipt.merge([train.receipt(), val.receipt()])

    assert sorted(numbers[0] + numbers[1]) == list(range(RECORDS))


def test_all_records_chosen_are_the_dataset_itself(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as whole, loader_on(lmdb_shards, records=np.ones(RECORDS, bool)) as chosen:
        assert chosen.identity == whole.identity
        whole.load_state_dict(chosen.state_dict())


@pytest.mark.parametrize("records", [None, np.arange(40, 150)], ids=["whole", "subset"])
def test_a_window_of_bytes_is_counted_in_records_of_the_chosen_ones_mean_size(
    lmdb_shards: Path, records: Any
) -> None:
    with open_dataset(lmdb_shards) as dataset:
        sizes = dataset.index["length"][slice(None) if records is None else records]

    with loader_on(lmdb_shards, records=records, shuffle=LocalShuffle("300KB")) as loader:
        assert loader.state_dict()["shuffle"]["window"] == 300_000 // sizes.mean()


def test_a_state_of_another_subset_is_refused(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, records=[1, 2, 3]) as loader:
        state = loader.state_dict()
    for records in (None, [1, 2, 4]):
        with (
            loader_on(lmdb_shards, records=records) as other,
            pytest.raises(UsageError, match=r"another dataset.*\(records= and classes= count as well\)"),
        ):
            other.load_state_dict(state)


def test_the_same_records_are_the_same_subset_however_they_are_given(lmdb_shards: Path) -> None:
    mask = np.zeros(RECORDS, bool)
    mask[[9, 4]] = True
    made = [mask, mask.tolist(), [9, 4], (4, 9), range(4, 10, 5), np.array([4, 9], np.uint16)]
    identities = []
    for records in made:
        with loader_on(lmdb_shards, records=records) as loader:
            identities.append(loader.identity)

    assert all(identity == identities[0] for identity in identities)


def test_classes_choose_by_name_and_by_label_and_labels_stay(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        names = [each.name for each in dataset.manifest.labels.classes]
        wanted = np.flatnonzero(np.isin(dataset.index["label"], [1, 3])).tolist()
    for classes in ([1, 3], [names[3], names[1]], (names[1], np.int64(3)), {1, 3}):
        with loader_on(lmdb_shards, classes=classes) as loader:
            batches = epoch_of(loader)
        assert sorted(numbers_in(batches)) == wanted
        assert {int(label) for batch in batches for label in batch[-2]} == {1, 3}


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


def test_a_record_number_that_does_not_fit_its_type_is_out_of_range(lmdb_shards: Path) -> None:
    with pytest.raises(UsageError, match="has 18446744073709551615"):
        loader_on(lmdb_shards, records=np.array([(1 << 64) - 1], np.uint64))


def test_bad_records_of_a_subset_are_skipped_under_their_keys(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        bad = dataset[100].key
    options = {"transform": Tagging({bad: reject}), "on_bad_record": "skip", "records": [7, 100, 203]}
    with loader_on(lmdb_shards, **options) as loader:
        assert sorted(numbers_in(epoch_of(loader))) == [7, 203]
        assert list(loader.skipped) == [bad]
        receipt = loader.receipt()
        receipt.check(3, skipped=1)
        assert loader.records[list(receipt.skipped)].tolist() == [100]


def test_sizes_in_bytes_are_of_the_chosen_records(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, records=[5], workers=0, batch_size=1) as loader:
        assert loader.stats().image_bytes == loader.dataset.index["length"][5]
