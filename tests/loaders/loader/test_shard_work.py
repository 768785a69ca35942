"""A worker's task, in this process: reading, checking, transforming, skipping."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats import Dataset, open_dataset
from shardprep.formats.errors import CorruptRecord, ShardDamaged, UsageError
from shardprep.formats.shards import read as shard_cache
from shardprep.loaders.batches.pickling import dumps, loads
from shardprep.loaders.batches.slots import Arrays, Memory
from shardprep.loaders.engine.messages import Items, Skipped
from shardprep.loaders.loader.work import STAGES, ShardWork, items_of
from shardprep.loaders.order.rng import record_rng
from shardprep.loaders.transforms.contract import Transform
from support import loader_workers
from support.datasets import flip, writable
from support.loader_workers import Misdeclared, Tagging


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


def test_without_a_transform_the_bytes_are_those_of_the_records(dataset: Dataset) -> None:
    outcomes, clock = outcomes_of(work_on(dataset), all_items(dataset))

    assert images(outcomes) == [record.image for record in dataset]
    assert clock[0] > 0


def test_without_a_transform_each_image_lies_in_the_room_that_was_asked_for_it(dataset: Dataset) -> None:
    given: list[Memory] = []

    def remembered(size: int) -> Memory:
        given.append(room(size))
        return given[-1]

    with work_on(dataset).open(np.zeros(len(STAGES))) as fill:
        outcomes = list(fill(all_items(dataset), {}, remembered))

    assert len(given) == len(dataset)
    assert all(outcome is memory for outcome, memory in zip(outcomes, given, strict=True))


@pytest.mark.slow
def test_no_library_of_a_container_is_imported_to_read(dataset: Dataset) -> None:
    code = """
import sys, numpy as np
from shardprep.loaders.batches.pickling import loads
work, items = loads(sys.stdin.buffer.read())
with work.open(np.zeros(len(work.stages))) as fill:
    assert len(list(fill(items, {}, None))) == len(items)
assert not {"lmdb", "h5py"} & set(sys.modules)
"""
    data = dumps((work_on(dataset), all_items(dataset)))
    subprocess.run([sys.executable, "-c", code], input=data, check=True)


def test_a_transform_sees_key_bytes_mapped_label_and_the_record_s_own_random_numbers(
    dataset: Dataset,
) -> None:
    numbers = np.array([7, 3, 190])
    arrays = {
        "crc": np.zeros(3, np.uint32),
        "draw": np.zeros((3, 2)),
        "seen": np.zeros(3, np.int64),
    }

    outcomes, _ = outcomes_of(work_on(dataset, Tagging()), items_of(dataset.index, numbers, 4), arrays)

    assert outcomes == [None] * 3
    for row, number in enumerate(numbers.tolist()):
        expected = Tagging()(dataset[number], record_rng(5, 4, number))
        assert arrays["crc"][row] == expected[0]
        assert (arrays["draw"][row] == expected[1]).all()
        assert arrays["seen"][row] == dataset[number].label + 10


def test_a_function_that_declares_nothing_gives_what_it_returns(dataset: Dataset) -> None:
    items = all_items(dataset)[:5]

    arrays, _ = outcomes_of(work_on(dataset, loader_workers.prefix), items)
    mappings, _ = outcomes_of(work_on(dataset, loader_workers.described), items)

    assert all(isinstance(array, np.ndarray) and 1 <= len(array) < 100 for array in arrays)
    assert mappings[2] == {"key": dataset[2].key, "label": dataset[2].label + 10}


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
    assert isinstance(skipped, Skipped)
    assert dataset[20].key in skipped.reason
    assert images(outcomes) == [record.image for number, record in enumerate(dataset) if number != 20]


def test_a_record_that_is_intact_but_another_one_is_an_error(dataset: Dataset) -> None:
    items = all_items(dataset)
    items["crc32c"][3] ^= 1

    with pytest.raises(CorruptRecord, match="record 3 does not match its CRC-32C"):
        outcomes_of(work_on(dataset), items)


def test_a_shard_of_another_size_is_an_error_even_where_bad_records_are_skipped(
    dataset: Dataset, tmp_path: Path
) -> None:
    shutil.copytree(dataset.path, tmp_path / "copy")
    os.truncate(writable(tmp_path / "copy" / dataset.manifest.shards[0].name), 5000)

    with pytest.raises(ShardDamaged, match="has 5000 bytes"):
        outcomes_of(work_on(dataset, folder=tmp_path / "copy", skip_bad=True), all_items(dataset)[:1])


def test_a_missing_shard_is_an_error_that_names_it(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="shard-00000"):
        outcomes_of(work_on(dataset, folder=tmp_path), all_items(dataset)[:1])


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


def test_two_works_in_one_process_read_the_same_shards(dataset: Dataset) -> None:
    with (
        work_on(dataset).open(np.zeros(len(STAGES))) as one,
        work_on(dataset).open(np.zeros(len(STAGES))) as other,
    ):
        pairs = zip(one(all_items(dataset), {}, room), other(all_items(dataset), {}, room), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_only_work_that_has_its_process_for_itself_limits_opencv(dataset: Dataset) -> None:
    threads = cv2.getNumThreads()
    try:
        cv2.setNumThreads(3)
        outcomes_of(work_on(dataset), all_items(dataset)[:1])
        assert cv2.getNumThreads() == 3
        outcomes_of(work_on(dataset, one_thread=True), all_items(dataset)[:1])
        assert cv2.getNumThreads() == 1
    finally:
        cv2.setNumThreads(threads)


def test_the_work_travels_to_another_process_in_little(dataset: Dataset) -> None:
    work = work_on(dataset, Tagging())
    data = dumps(work)

    assert loads(data) == work
    assert len(data) < 4000


def test_shards_can_be_read_by_several_threads_of_work(dataset: Dataset) -> None:
    found: dict[int, list[bytes]] = {}

    def read(n: int) -> None:
        found[n] = images(outcomes_of(replace(work_on(dataset), seed=n), all_items(dataset))[0])

    run_together([lambda n=n: read(n) for n in range(3)])

    assert found[0] == found[1] == found[2] == [record.image for record in dataset]


def run_together(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
