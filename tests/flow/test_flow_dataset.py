"""A converted dataset as a flow: its records, in the loader's order, read in any process."""

from __future__ import annotations

import gc
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import CorruptRecord, ManifestDamaged, UsageError
from shardprep.formats.storage.open import open_dataset
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle
from shardprep.loaders.flow import dataset_source as flow_dataset
from shardprep.loaders.flow.dataset_source import FromDataset
from shardprep.loaders.flow.node import Fetched
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.flow.steps import LocallyShuffled, Take
from support.datasets import flip, writable
from support.flow_members import all_of

SHUFFLES = [None, LocalShuffle(1), LocalShuffle(30), LocalShuffle("500kB"), GlobalShuffle()]


def node_of(path: Path, **options: Any) -> FromDataset:
    return FromDataset.of(
        path, **{"shuffle": None, "seed": 0, "label_space": "sorted_wnid0", "with_keys": False, **options}
    )


@pytest.fixture(params=["lmdb", "hdf5"])
def shards(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_shards")
    return path


@pytest.fixture
def copy(lmdb_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lmdb_shards, tmp_path / "copy"))


def test_records_come_as_they_are_stored(shards: Path) -> None:
    flow = Flow.from_dataset(shards, with_keys=True)
    with open_dataset(shards) as dataset:
        assert list(flow) == [(record.key, record.image, record.label) for record in dataset]
        assert len(flow) == len(dataset)
    assert flow.batches_never_change
    for image, label in Flow.from_dataset(shards).take(3):
        assert (type(image), type(label)) == (bytes, int)


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_a_pass_has_the_order_of_the_loaders_epoch(lmdb_shards: Path, shuffle: Any) -> None:
    flow = Flow.from_dataset(lmdb_shards, shuffle=shuffle, seed=7, with_keys=True)
    with Loader(
        lmdb_shards, batch_size=20, shuffle=shuffle, seed=7, workers=0, drop_last=False, with_numbers=True
    ) as loader:
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            keys = [loader.key(number) for *_, numbers in loader for number in numbers]
            assert [key for key, *_ in flow.at_pass(epoch)] == keys


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_any_records_of_a_pass_can_be_had(lmdb_shards: Path, shuffle: Any) -> None:
    flow = Flow.from_dataset(lmdb_shards, shuffle=shuffle)
    whole = list(flow.at_pass(2))
    wanted = [5, 203, 0, 0, *range(100)]
    assert list(flow.pick(2, wanted)) == [whole[n] for n in wanted]
    with pytest.raises(IndexError, match="item 204 of 204"):
        list(flow.pick(2, [204]))


@pytest.mark.parametrize("space", ["sorted_wnid0", "sorted_wnid1_bg", "ilsvrc2012_id"])
def test_labels_are_in_the_space_that_was_asked_for(lmdb_shards: Path, space: str) -> None:
    with open_dataset(lmdb_shards, labels=space) as dataset:
        assert [label for _, label in Flow.from_dataset(lmdb_shards, labels=space)] == [
            r.label for r in dataset
        ]


def test_a_copy_reads_by_path(lmdb_shards: Path) -> None:
    node = node_of(lmdb_shards, shuffle=LocalShuffle(50), with_keys=True)
    pickled = pickle.dumps(node)
    assert len(pickled) < 2000
    assert all_of(pickle.loads(pickled)) == all_of(node)  # noqa: S301


def test_what_fetches_needs_a_key_and_the_shards_but_no_index(lmdb_shards: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(lmdb_shards, tmp_path / "copy"))
    node = node_of(folder, shuffle=GlobalShuffle())
    (folder / "index.npy").unlink()
    whole = list(node.run(PassContext(1)))
    fetch, keys = pickle.loads(pickle.dumps((node.fetch(), list(node.keys(PassContext(1), [4, 2])))))  # noqa: S301
    assert all(len(pickle.dumps(key)) < 100 for key in keys)
    with fetch.open() as item_of:
        assert [item_of(key) for key in keys] == [whole[4], whole[2]]


def test_a_flow_may_be_read_after_the_working_directory_changed(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lmdb_shards.parent)
    flow = Flow.from_dataset(lmdb_shards.name)
    monkeypatch.chdir("/")
    assert len(list(flow)) == 204


def test_what_is_shuffled_and_taken_is_fetched_all_the_same(lmdb_shards: Path) -> None:
    node = Take.of(LocallyShuffled.of(node_of(lmdb_shards), 40, 3), 50)
    assert isinstance(node, Fetched)
    plainly = Take(LocallyShuffled(node_of(lmdb_shards), 40, 3), 50)
    assert not isinstance(plainly, Fetched)

    with node.fetch().open() as item_of:
        fetched = [item_of(key) for key in node.keys(PassContext(2), range(50))]
    assert fetched == list(node.run(PassContext(2))) == list(plainly.run(PassContext(2)))
    copy = pickle.loads(pickle.dumps(node))  # noqa: S301
    assert list(copy.run(PassContext(2))) == fetched
    with pytest.raises(IndexError, match="item 50 of 50"):
        list(node.keys(PassContext(), [50]))


class RecordingReadAhead:
    """A ReadAhead that records the announced numbers."""

    made: list[RecordingReadAhead]

    def __init__(self, stream: Any, *, budget: int) -> None:
        self.numbers: list[int] = []
        self.closed = False
        RecordingReadAhead.made.append(self)

    def expect(self, numbers: np.ndarray) -> None:
        self.numbers += numbers.tolist()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[RecordingReadAhead]:
    RecordingReadAhead.made = []
    monkeypatch.setattr(flow_dataset, "ReadAhead", RecordingReadAhead)
    monkeypatch.setattr(flow_dataset, "ANNOUNCED_RECORDS", 16)
    return RecordingReadAhead.made


@pytest.mark.parametrize("shuffle", [None, LocalShuffle(30)], ids=str)
def test_what_comes_next_is_read_ahead_where_shards_are_read_through(
    lmdb_shards: Path, announced: list[RecordingReadAhead], shuffle: Any
) -> None:
    node = node_of(lmdb_shards, shuffle=shuffle)
    order = node.plan.order(0)[:].tolist()
    assert len(list(node.keys(PassContext(), range(204)))) == 204
    (reader,) = announced
    assert reader.numbers == order
    assert reader.closed

    items = node.run(PassContext())
    next(items)
    assert announced[1].numbers == order[:16]
    del items
    gc.collect()
    assert announced[1].closed


def test_nothing_is_read_ahead_of_what_comes_in_another_order(
    lmdb_shards: Path, announced: list[RecordingReadAhead]
) -> None:
    list(node_of(lmdb_shards, shuffle=GlobalShuffle()).run(PassContext()))
    assert not announced
    list(node_of(lmdb_shards).pick(PassContext(), [7, 3, 16]))
    assert not announced[0].numbers


def test_the_thread_that_reads_ahead_ends_with_the_pass(lmdb_shards: Path) -> None:
    before = threading.active_count()
    items = iter(Flow.from_dataset(lmdb_shards))
    next(items)
    assert threading.active_count() == before + 1
    items.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_a_flipped_bit_is_an_error_when_it_is_read(copy: Path) -> None:
    with open_dataset(copy) as dataset:
        shard = copy / dataset.manifest.shards[0].name
        image, key = dataset[3].image, dataset[3].key
    flip(shard, shard.read_bytes().index(image) + 50)
    items = iter(Flow.from_dataset(copy))
    assert len([next(items) for _ in range(3)]) == 3
    with pytest.raises(CorruptRecord) as raised:
        next(items)
    assert raised.value.key == key


def test_a_damaged_dataset_is_an_error_at_once(copy: Path) -> None:
    manifest = writable(copy / "manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"lmdb", b"LMDB"))
    with pytest.raises(ManifestDamaged):
        Flow.from_dataset(copy)


def test_an_invalid_option_is_an_error_at_once(lmdb_shards: Path) -> None:
    for wrong in ({"labels": "mine"}, {"seed": -1}, {"seed": 1.5}, {"seed": True}, {"shuffle": 30}):
        with pytest.raises(UsageError):
            Flow.from_dataset(lmdb_shards, **wrong)  # type: ignore[arg-type]
