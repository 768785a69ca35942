"""The results of a transform that declares no outputs are stacked, whatever the number of workers."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import Dataset, open_dataset
from shardprep.loaders import TransformInput, decode_rgb
from shardprep.loaders.order.rng import record_rng
from support.loaded import assert_exactly_once, exact, loader_on, own

Rng = np.random.Generator


@pytest.fixture
def dataset(lmdb_shards: Path) -> Iterator[Dataset]:
    with open_dataset(lmdb_shards) as opened:
        yield opened


def image(record: TransformInput, rng: Rng) -> Any:
    return np.resize(decode_rgb(record.image), (16, 16, 3)) * np.float32(rng.random())


def number(record: TransformInput, rng: Rng) -> Any:
    return len(record.image)


def parts(record: TransformInput, rng: Rng) -> Any:
    return image(record, rng), rng.random(), np.int16(record.label), record.label > 1


def data(record: TransformInput, rng: Rng) -> Any:
    return bytes(record.image[:7])


def copied(part: Any) -> Any:
    """A part of a batch that holds no memory of the loader."""
    if isinstance(part, dict):
        return {name: copied(inner) for name, inner in part.items()}
    if isinstance(part, tuple | list):
        return type(part)(map(copied, part))
    return own(part)


def form(part: Any) -> Any:
    """What is compared: kinds, dtypes, shapes and bytes."""
    if isinstance(part, dict):
        return {name: form(inner) for name, inner in part.items()}
    if isinstance(part, tuple | list):
        return type(part), [form(inner) for inner in part]
    return exact(part)


def epoch(path: Path, transform: Any, **options: Any) -> list[Any]:
    with loader_on(path, transform=transform, **options) as loader:
        batches = [copied(batch) for batch in loader]
        assert_exactly_once(loader, batches)
    return batches


def results_of(dataset: Dataset, transform: Any, numbers: Any) -> list[Any]:
    return [transform(dataset[int(n)], record_rng(0, 0, int(n))) for n in numbers]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_results_of_one_shape_are_stacked(dataset: Dataset, workers: int) -> None:
    for batch in epoch(dataset.path, parts, workers=workers)[:3]:
        images, draws, labels, _, own_labels, numbers = batch
        assert images.shape == (10, 16, 16, 3)
        assert [part.dtype for part in batch] == ["f4", "f8", "i2", "?", "i8", "i8"]
        assert (labels == own_labels).all()
        expected = results_of(dataset, parts, numbers)
        np.testing.assert_array_equal(images, [each[0] for each in expected])
        np.testing.assert_array_equal(draws, [each[1] for each in expected])


@pytest.mark.torture
def test_from_the_second_batch_on_no_result_is_sent(lmdb_shards: Path) -> None:
    """The workers write the rows: the batches lie in the slots' memory, at multiples of 64 bytes."""
    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        list(loader)
        with loader._requests.run(loader.engine, iter([np.arange(10)]), iter([0]), 0) as batches:
            for batch in batches:
                assert not batch.payloads
                assert [array.ctypes.data % 64 for array in batch.arrays.values()] == [0] * 4


@pytest.mark.torture
def test_where_addresses_are_limited_batches_are_the_same(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = epoch(lmdb_shards, parts, workers=1)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1 << 40, 1 << 40))

    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        assert loader.engine.layout.inputs == 0
        assert form([copied(batch) for batch in loader]) == form(free)


@pytest.mark.torture
def test_only_rows_that_are_written_take_memory(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=image, workers=1) as loader:
        list(loader)
        assert 0 < loader.engine.shared_bytes < 64 << 20
    assert loader.engine.shared_bytes == 0
