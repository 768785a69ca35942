"""The index is in memory once a dataset is open; what it says of a record is compared with the record."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import CorruptRecord, ManifestDamaged
from shardprep.loaders import Flow
from support.datasets import writable
from support.fuzz_targets import seal
from support.loaded import Kept, assert_same, epoch_of, loader_on
from support.sampling import torture_except


@pytest.fixture
def copy(lmdb_shards: Path, tmp_path: Path) -> Path:
    """A dataset that may be damaged."""
    return Path(shutil.copytree(lmdb_shards, tmp_path / "copy"))


def relabelled(index: Path) -> None:
    rows = np.load(index, mmap_mode="r+")
    rows["label"] = (rows["label"] + 1) % 4
    rows.flush()


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([0, 2], 0))
def test_what_becomes_of_the_index_does_not_matter_once_it_is_open(copy: Path, workers: int) -> None:
    with loader_on(copy, transform=None) as honest:
        expected = epoch_of(honest)
    with loader_on(copy, transform=None, workers=workers) as loader, open_dataset(copy) as dataset:
        batches = iter(loader)
        found = epoch_of(batches, 3)
        relabelled(writable(copy / "index.npy"))
        found += epoch_of(batches, 8)
        os.truncate(copy / "index.npy", 200)
        found += epoch_of(batches)
        records = [record.label for record in dataset]

    assert_same(found, expected)
    loader.receipt().check(204)
    assert records == labels_of(expected)


def labels_of(batches: list[Kept]) -> list[int]:
    """In the order of the records."""
    pairs = [pair for *_, labels, numbers in batches for pair in zip(numbers, labels, strict=True)]
    return [int(label) for _, label in sorted(pairs)]


def changed_row(dataset: Path, number: int, column: str, value: object) -> str:
    """Publish the dataset again with another index; return the key that the row had."""
    rows = np.load(dataset / "index.npy").copy()
    key: bytes = rows["key"][number]
    rows[column][number] = value
    np.save(writable(dataset / "index.npy"), rows)
    seal(dataset)
    return key.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "column", "value"),
    torture_except(
        [
            (1, "label", 3),
            (0, "label", 3),
            (0, "label", -1),
            (0, "key", b"n1/other"),
            (0, "crc32c", 7),
            (0, "offset", 100),
        ],
        (0, "label", 3),
        (0, "label", -1),
        (0, "key", b"n1/other"),
        (0, "crc32c", 7),
        (0, "offset", 100),
    ),
)
def test_a_record_that_is_not_as_the_index_says_is_corrupt(
    copy: Path, workers: int, column: str, value: object
) -> None:
    with open_dataset(copy) as dataset:
        number = next(n for n in range(20, 204) if dataset.index["label"][n] not in (3, -1))
    key = changed_row(copy, number, column, value)
    if column == "key":
        key = bytes(value).decode()

    for transform in ({"transform": None}, {}):
        with (
            loader_on(copy, workers=workers, shuffle=None, **transform) as loader,
            pytest.raises(CorruptRecord, match="does not match its CRC-32C") as raised,
        ):
            epoch_of(loader)
        assert raised.value.key == key
        assert raised.value.shard is not None


def test_a_dataset_and_a_flow_compare_with_the_index_too(copy: Path) -> None:
    with open_dataset(copy) as dataset:
        label = (int(dataset.index["label"][20]) + 1) % 4
    changed_row(copy, 20, "label", label)

    with open_dataset(copy) as dataset, pytest.raises(CorruptRecord, match="does not match its CRC-32C"):
        dataset[20]
    with pytest.raises(CorruptRecord, match="does not match its CRC-32C"):
        list(Flow.from_dataset(copy))


def test_a_record_that_is_not_as_the_index_says_is_skipped_on_request(copy: Path) -> None:
    with open_dataset(copy) as dataset:
        label = (int(dataset.index["label"][20]) + 1) % 4
    key = changed_row(copy, 20, "label", label)

    with loader_on(copy, workers=1, on_bad_record="skip") as loader:
        batches = epoch_of(loader)
        assert list(loader.skipped) == [key]
    assert len(labels_of(batches)) == 203


@pytest.mark.parametrize(
    ("column", "value"), [("label", 4), ("label", -2), ("shard", 9), ("shard", 1), ("ordinal", 5)]
)
def test_an_index_that_cannot_be_relied_on_is_refused(copy: Path, column: str, value: object) -> None:
    changed_row(copy, 0, column, value)

    with pytest.raises(ManifestDamaged, match=r"index\.npy"):
        open_dataset(copy)
