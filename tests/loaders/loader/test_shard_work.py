"""A worker's task, in this process: reading, checking, transforming, skipping."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import Dataset, open_dataset
from shardprep.formats.errors import CorruptRecord, UsageError
from shardprep.formats.shards import read as shard_cache
from shardprep.loaders.batches.slots import Arrays, Memory
from shardprep.loaders.engine.messages import Items, SkippedRow
from shardprep.loaders.loader.work import STAGES, ShardWork, items_of
from shardprep.loaders.transforms.contract import Transform
from support import loader_workers
from support.datasets import flip
from support.loader_workers import Misdeclared


@pytest.fixture(params=["lmdb", "hdf5"])
def shards(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_shards")
    return path


@pytest.fixture
def dataset(shards: Path) -> Iterator[Dataset]:
    with open_dataset(shards) as opened:
        yield opened


def work_on(
    dataset: Dataset, transform: Transform | None = None, folder: Path | None = None, **options: Any
) -> ShardWork:
    defaults = {
        "parts": (replace(dataset.parts[0].files("sorted_wnid0"), folder=folder or dataset.path),),
        "key_bytes": dataset.index.dtype["key"].itemsize,
        "transform": transform,
        "label_map": (10, 11, 12, 13, -1),
        "seed": 5,
        "skip_bad": False,
        "one_thread": False,
    }
    return ShardWork(**(defaults | options))


def outcomes_of(work: ShardWork, items: Items, arrays: Arrays | None = None) -> tuple[list[object], Any]:
    clock = np.zeros(len(work.stages))
    with work.open(clock) as fill:
        return list(fill(items, arrays or {}, room)), clock


def room(size: int) -> Memory:
    return np.empty(size, np.uint8)


def images(outcomes: list[object]) -> list[bytes]:
    """The payload as bytes, from the array that every image is without a transform."""
    return [outcome.tobytes() for outcome in outcomes if isinstance(outcome, np.ndarray)]


def all_items(dataset: Dataset, epoch: int = 0) -> Items:
    return items_of(dataset.index, np.arange(len(dataset)), epoch)


def damaged(dataset: Dataset, folder: Path, number: int) -> Dataset:
    """A copy of the dataset with one flipped bit in a record's image."""
    shutil.copytree(dataset.path, folder / "copy")
    copy = open_dataset(folder / "copy")
    path = copy.path / copy.manifest.shards[int(copy.index["shard"][number])].name
    flip(path, path.read_bytes().index(dataset[number].image) + 100)
    return copy


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (loader_workers.nothing, "returned None"),
        (Misdeclared(), r"declares uint8\[3\] and returns uint8\[4\]"),
    ],
)
def test_a_transform_that_breaks_its_word_is_an_error_with_the_key(
    dataset: Dataset, transform: Transform, message: str
) -> None:
    arrays = {"image": np.zeros((1, 3), np.uint8)}

    with pytest.raises(UsageError, match=message) as raised:
        outcomes_of(work_on(dataset, transform), all_items(dataset)[:1], arrays)

    assert raised.value.key == dataset[0].key


def test_a_flipped_bit_is_an_error_with_shard_and_key(dataset: Dataset, tmp_path: Path) -> None:
    copy = damaged(dataset, tmp_path, 20)

    with pytest.raises(CorruptRecord) as raised:
        outcomes_of(work_on(copy), all_items(copy))

    assert raised.value.key == dataset[20].key
    assert raised.value.shard == copy.manifest.shards[int(copy.index["shard"][20])].name


def test_a_flipped_bit_is_skipped_on_request_with_its_reason(dataset: Dataset, tmp_path: Path) -> None:
    copy = damaged(dataset, tmp_path, 20)

    outcomes, _ = outcomes_of(work_on(copy, skip_bad=True), all_items(copy))

    skipped = outcomes.pop(20)
    assert isinstance(skipped, SkippedRow)
    assert dataset[20].key in skipped.reason
    assert images(outcomes) == [record.image for number, record in enumerate(dataset) if number != 20]


def test_a_record_that_is_intact_but_another_one_is_an_error(dataset: Dataset) -> None:
    items = all_items(dataset)
    items["crc32c"][3] ^= 1

    with pytest.raises(CorruptRecord, match="record 3 does not match its CRC-32C"):
        outcomes_of(work_on(dataset), items)


@pytest.mark.slow
def test_few_shards_are_open_at_once_and_none_when_the_work_is_done(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "MAX_OPEN", 3)
    shuffled = np.random.default_rng(0).permutation(len(dataset))
    before, most = open_files(dataset.path), 0

    with work_on(dataset).open(np.zeros(len(STAGES))) as fill:
        outcomes = fill(items_of(dataset.index, shuffled, 0), {}, room)
        for number, outcome in zip(shuffled, outcomes, strict=True):
            assert images([outcome]) == [dataset[int(number)].image]
            dataset.close()
            most = max(most, open_files(dataset.path) - before)

    assert most == 3
    assert open_files(dataset.path) == before


def open_files(folder: Path) -> int:
    def target(link: Path) -> str:
        try:
            return str(link.readlink())
        except FileNotFoundError:
            return ""

    return sum(target(link).startswith(str(folder)) for link in Path("/proc/self/fd").iterdir())
