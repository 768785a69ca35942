"""The results of a transform that declares no outputs are stacked, whatever the number of workers."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import Dataset, open_dataset
from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import ArraySpec, TransformInput, decode_rgb
from shardprep.loaders.order.rng import record_rng
from support.loaded import assert_exactly_once, assert_same, exact, loader_on, own
from support.loader_workers import described, prefix
from support.sampling import torture_except

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


def single(record: TransformInput, rng: Rng) -> Any:
    return (rng.random(3),)


def named(record: TransformInput, rng: Rng) -> Any:
    return {"image": image(record, rng), "length": len(record.image)}


def nested(record: TransformInput, rng: Rng) -> Any:
    return {"image": image(record, rng)}, (rng.random(2), {"n": record.label})


def boxes(record: TransformInput, rng: Rng) -> Any:
    return {"image": image(record, rng), "boxes": rng.random((rng.integers(4), 4)), "key": record.key}


def seldom_larger(record: TransformInput, rng: Rng) -> Any:
    """An image, at one record in ten of another size."""
    return np.full((7, 8 + (len(record.image) % 10 == 0), 3), record.label, np.uint8)


def in_lists(record: TransformInput, rng: Rng) -> Any:
    return [rng.random(2), rng.random(3)]


def text(record: TransformInput, rng: Rng) -> Any:
    return record.key


def data(record: TransformInput, rng: Rng) -> Any:
    return bytes(record.image[:7])


def masked(record: TransformInput, rng: Rng) -> Any:
    return np.ma.array(rng.random(3), mask=[False, True, False])


def images_but_bad_ones(record: TransformInput, rng: Rng) -> Any:
    if len(record.image) % 3 == 0:
        raise BadImage("does not decode")
    return named(record, rng)


STACKED = [image, number, parts, single, named, nested]
LISTED = [prefix, described, boxes, seldom_larger, in_lists, text, data, masked]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    torture_except(STACKED + LISTED, parts, masked),
    ids=lambda transform: transform.__name__,
)
def test_batches_are_the_same_bit_for_bit_for_any_number_of_workers(
    lmdb_shards: Path, transform: Any
) -> None:
    here, there = (epoch(lmdb_shards, transform, workers=workers) for workers in (0, 2))

    assert form(there) == form(here)


def test_a_masked_array_keeps_its_mask(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=masked, workers=1) as loader:
        values, *_ = next(iter(loader))

    assert all(np.ma.getmaskarray(value).tolist() == [False, True, False] for value in values)


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


def test_a_dict_is_one_part_of_a_batch(dataset: Dataset) -> None:
    found, _, numbers = epoch(dataset.path, named)[0]

    assert list(found) == ["image", "length"]
    assert (found["image"].shape, found["image"].dtype) == ((10, 16, 16, 3), np.float32)
    assert found["length"].tolist() == [len(dataset[int(n)].image) for n in numbers]


def test_what_differs_in_shape_is_a_list_beside_what_does_not(dataset: Dataset) -> None:
    found, *_ = epoch(dataset.path, boxes)[0]

    assert found["image"].shape == (10, 16, 16, 3)
    assert {part.shape[1:] for part in found["boxes"]} == {(4,)}
    assert isinstance(found["boxes"], list)
    assert all(isinstance(key, str) for key in found["key"])


class Declaring:
    """The same images as ``image``, declared."""

    outputs = (ArraySpec("image", (16, 16, 3), "float32"),)

    def __call__(self, record: TransformInput, rng: Rng) -> Any:
        return image(record, rng)


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([0, 1], 0))
def test_a_batch_is_the_same_as_with_declared_outputs(lmdb_shards: Path, workers: int) -> None:
    assert_same(epoch(lmdb_shards, image, workers=workers), epoch(lmdb_shards, Declaring(), workers=workers))


@pytest.mark.torture
def test_from_the_second_batch_on_no_result_is_sent(lmdb_shards: Path) -> None:
    """The workers write the rows: the batches lie in the slots' memory, at multiples of 64 bytes."""
    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        list(loader)
        with loader._requests.run(loader.engine, iter([np.arange(10)]), iter([0]), 0) as batches:
            for batch in batches:
                assert not batch.payloads
                assert [array.ctypes.data % 64 for array in batch.arrays.values()] == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", torture_except([1, 10], 10))
def test_skipped_records_are_left_out_of_every_part(dataset: Dataset, workers: int, size: int) -> None:
    options = {"on_bad_record": "skip", "workers": workers, "batch_size": size, "shuffle": None}
    with loader_on(dataset.path, transform=images_but_bad_ones, **options) as loader:
        batches = [copied(batch) for batch in loader]
        loader.receipt().check(204, skipped=69)

    good = [n for n in range(204) if len(dataset[n].image) % 3]
    seen = [n for batch in batches for n in batch[-1].tolist()]
    assert seen == good
    for found, labels, numbers in batches[3:]:
        assert found["image"].shape == (len(numbers), 16, 16, 3)
        assert len(found["length"]) == len(labels) == len(numbers)


def mixed(record: TransformInput, rng: Rng) -> Any:
    return (1, 2) if rng.random() < 0.5 else (1, 2, 3)


def sometimes_a_dict(record: TransformInput, rng: Rng) -> Any:
    return {"a": 1} if rng.random() < 0.5 else 1


@pytest.mark.parametrize("transform", [mixed, sometimes_a_dict])
def test_results_of_different_forms_are_an_error(lmdb_shards: Path, transform: Callable[..., Any]) -> None:
    with (
        loader_on(lmdb_shards, transform=transform) as loader,
        pytest.raises(UsageError, match=r"different (numbers of parts|forms)"),
    ):
        list(loader)


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


@pytest.mark.slow
def test_batches_that_are_held_do_not_change(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=image, workers=1, slots=3) as loader:
        held, kept = [], []
        for batch in loader:
            held.append(batch)
            kept.append(copied(batch))

    assert_same([tuple(batch) for batch in held], kept)
