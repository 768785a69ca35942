"""A loader of a part of a dataset: order, ranks, receipts and states are exact over the chosen records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from loaded import assert_same, epoch_of, loader_on, numbers_in
from loader_workers import Tagging, reject

from shardprep.formats import open_dataset
from shardprep.formats.errors import UsageError
from shardprep.loaders import GlobalShuffle, Loader, LocalShuffle, Receipt

RECORDS = 204
SHUFFLES = st.sampled_from([None, LocalShuffle(1), LocalShuffle(30), LocalShuffle("300KB"), GlobalShuffle()])
LAW = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the shards are read only


@st.composite
def choices(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """A mask, dense or sparse, or record numbers in any order; at least one record."""
    seed, share = draw(st.integers(0, 1 << 32)), draw(st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]))
    mask = np.random.default_rng(seed).random(RECORDS) < share
    mask[draw(st.integers(0, RECORDS - 1))] = True
    numbers = np.random.default_rng(seed).permutation(np.flatnonzero(mask))
    return mask if draw(st.booleans()) else numbers.astype(draw(st.sampled_from(["int64", "uint8", ">i4"])))


def chosen_by(records: np.ndarray[Any, Any]) -> list[int]:
    return sorted((np.flatnonzero(records) if records.dtype == bool else records).tolist())


@LAW
@given(
    records=choices(),
    shuffle=SHUFFLES,
    batch_size=st.integers(1, 50),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_all_ranks_together_deliver_each_chosen_record_exactly_once(
    lmdb_shards: Path, records: Any, shuffle: Any, batch_size: int, world_size: int, seed: int
) -> None:
    assume(len(chosen_by(records)) >= world_size)
    delivered, receipts = [], []
    for rank in range(world_size):
        options = {"shuffle": shuffle, "batch_size": batch_size, "seed": seed}
        with loader_on(lmdb_shards, records=records, rank=rank, world_size=world_size, **options) as loader:
            batches = epoch_of(loader)
            assert len(batches) == loader.batches_per_epoch
            delivered += numbers_in(batches)
            receipts.append(loader.receipt())
            assert loader.records.tolist() == chosen_by(records)

    assert sorted(delivered) == chosen_by(records)
    Receipt.merge(receipts).check(len(delivered))


@pytest.mark.torture
@LAW
@given(records=choices(), shuffle=SHUFFLES, batch_size=st.integers(1, 30), data=st.data())
def test_going_on_in_the_middle_of_a_subset_equals_the_uninterrupted_run(
    lmdb_shards: Path, records: Any, shuffle: Any, batch_size: int, data: st.DataObject
) -> None:
    options = {"records": records, "shuffle": shuffle, "batch_size": batch_size}
    with loader_on(lmdb_shards, **options) as loader:
        whole = epoch_of(loader)
        receipt = loader.receipt()
    step = data.draw(st.integers(0, len(whole) - 1))
    with loader_on(lmdb_shards, **options) as loader:
        first = epoch_of(loader, step) if step else []
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_on(lmdb_shards, **options) as loader:
        loader.load_state_dict(state)
        assert_same(first + epoch_of(loader), whole)
        assert loader.receipt() == receipt


@pytest.mark.torture
@settings(LAW, max_examples=2)
@given(records=choices(), shuffle=SHUFFLES)
def test_any_number_of_workers_delivers_the_same_subset(
    lmdb_shards: Path, records: Any, shuffle: Any
) -> None:
    epochs = []
    for workers in (0, 1, 2):
        with loader_on(lmdb_shards, records=records, shuffle=shuffle, workers=workers) as loader:
            epochs.append(epoch_of(loader) + epoch_of(loader))

    assert_same(epochs[0], epochs[1])
    assert_same(epochs[0], epochs[2])


def test_a_record_is_augmented_in_a_subset_as_in_the_dataset(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, shuffle=None, batch_size=1) as loader:
        whole = epoch_of(loader)
    with loader_on(lmdb_shards, shuffle=None, batch_size=1, records=[7, 100, 203]) as loader:
        assert_same(epoch_of(loader), [whole[7], whole[100], whole[203]])


def test_a_local_shuffle_reads_the_chosen_records_shard_by_shard(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, records=np.arange(0, RECORDS, 3), shuffle=LocalShuffle(1)) as loader:
        shards = loader.dataset.index["shard"][numbers_in(epoch_of(loader))]

    changes = np.count_nonzero(np.diff(shards.astype(int)))
    assert changes == len(set(shards.tolist())) - 1 > 3


def test_stored_order_is_the_order_whatever_the_order_of_the_numbers(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, shuffle=None, records=[50, 3, 20]) as loader:
        assert numbers_in(epoch_of(loader)) == [3, 20, 50]


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


def test_a_state_of_another_subset_is_refused(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, records=[1, 2, 3]) as loader:
        state = loader.state_dict()
    for records in (None, [1, 2, 4]):
        with (
            loader_on(lmdb_shards, records=records) as other,
            pytest.raises(UsageError, match=r"another dataset.*\(records= and classes= count, too\)"),
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


def test_labels_that_choose_classes_are_those_of_the_label_space(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, classes=[4], labels="sorted_wnid1_bg") as loader:
        assert {int(label) for batch in epoch_of(loader) for label in batch[-2]} == {4}
        assert set(loader.dataset.index["label"][loader.records].tolist()) == {3}


def test_records_and_classes_together_choose_what_is_in_both(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, records=np.arange(100), classes=[2]) as loader:
        labels = loader.dataset.index["label"]
        assert loader.records.tolist() == [n for n in range(100) if labels[n] == 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": [3, 5, 3]}, "has 3 more than once"),
        ({"records": [0, RECORDS]}, f"has {RECORDS}; record numbers of this dataset are 0 to {RECORDS - 1}"),
        ({"records": [-1]}, "has -1; record numbers"),
        ({"records": []}, "choose no record"),
        ({"records": [False] * RECORDS}, "choose no record"),
        ({"records": [True] * 10}, f"a mask of 10 records; the dataset has {RECORDS}"),
        ({"records": [0.5, 1.0]}, "not an array of float64"),
        ({"records": [[1], [2]]}, r"of shape \(2, 1\)"),
        ({"records": "7"}, "must be a boolean mask"),
        ({"records": {1, 2}}, "must be a boolean mask"),
        ({"records": 7}, "must be a boolean mask"),
        ({"classes": []}, "choose no record"),
        ({"classes": "n01440764"}, "must be a list of class names or labels"),
        ({"classes": 3}, "must be a list of class names or labels"),
        ({"classes": ["dog"]}, r"no class 'dog'; its classes are n\d+, .* labels \(sorted_wnid0\) 0 to 3"),
        ({"classes": [4]}, "no class 4"),
        ({"classes": [-1]}, "no class -1"),
        ({"classes": [[1]]}, r"no class \[1\]"),
        ({"records": [0], "classes": []}, "choose no record"),
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


def test_steps_of_a_subset_are_those_of_its_epochs(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, records=np.arange(0, RECORDS, 2), drop_last=True) as loader:
        whole = epoch_of(loader)
        made = list(loader.steps(0, [9, 0]))

    assert_same([made[1].batch, made[0].batch], [whole[0], whole[9]])
    assert len(made[0].left_out) == 2
    assert made[0].left_out.max() < 102


def test_sizes_in_bytes_are_of_the_chosen_records(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, records=[5], workers=0, batch_size=1) as loader:
        assert loader.stats().image_bytes == loader.dataset.index["length"][5]
