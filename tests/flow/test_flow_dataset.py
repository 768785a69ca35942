"""A converted dataset as a flow: its records, in the loader's order, read in any process."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.storage.open import open_dataset
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle
from shardprep.loaders.flow import dataset_source as flow_dataset
from shardprep.loaders.flow.dataset_source import FromDataset
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.flow.steps import LocallyShuffled, Take
from support.datasets import writable

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


def test_what_is_shuffled_and_taken_is_fetched_all_the_same(lmdb_shards: Path) -> None:
    node = Take(LocallyShuffled(node_of(lmdb_shards), 40, 3), 50)
    assert node.can_fetch

    with node.fetch().open() as item_of:
        fetched = [item_of(key) for key in node.keys(PassContext(2), range(50))]
    assert fetched == list(node.run(PassContext(2)))
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


def test_a_damaged_dataset_is_an_error_at_once(copy: Path) -> None:
    manifest = writable(copy / "manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"lmdb", b"LMDB"))
    with pytest.raises(ManifestDamaged):
        Flow.from_dataset(copy)
