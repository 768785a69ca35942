"""FakeData: batches in the form of a loader's, without a dataset."""

from __future__ import annotations

import copy
import math
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, TrainTransform, decode_rgb
from shardprep.loaders.loader.fake import FakeData
from support.loaded import assert_same, epoch_of


def test_a_batch_is_as_a_loaders(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=6, transform=TrainTransform(24), workers=0) as loader:
        specs, size, (images, labels) = loader.batch_specs, loader.batch_bytes, next(iter(loader))
    fake = FakeData(3, batch_size=6, size=(24, 24))

    batches = list(fake)

    assert len(fake) == len(batches) == 3
    assert (fake.batch_specs, fake.batch_bytes) == (specs, size)
    for fake_images, fake_labels in batches:
        assert (fake_images.shape, fake_images.dtype) == (images.shape, images.dtype)
        assert (fake_labels.shape, fake_labels.dtype) == (labels.shape, labels.dtype)


@pytest.mark.parametrize("size", [(24, 24), (7, 5), (1, 1), (224, 224)])
def test_arrays_are_read_only_and_lie_on_64_bytes(size: tuple[int, int]) -> None:
    for images, labels in FakeData(5, batch_size=3, size=size):
        assert images.shape == (3, *size, 3)
        for array in (images, labels):
            assert not array.flags.writeable
            assert array.ctypes.data % 64 == 0
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


@pytest.mark.slow
@pytest.mark.parametrize("encoded", [False, True])
def test_equal_arguments_make_equal_batches_in_every_iteration(encoded: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "size": (8, 8), "encoded": encoded}
    fake = FakeData(4, **options)
    first = epoch_of(fake)

    assert_same(first, epoch_of(fake))
    assert_same(first, epoch_of(FakeData(4, **options)))
    with pytest.raises(AssertionError):
        assert_same(first, epoch_of(FakeData(4, **options, seed=1)))


def test_batches_differ_from_each_other() -> None:
    batches = epoch_of(FakeData(4, batch_size=8, size=(8, 8)))

    assert len({images.tobytes() for images, _ in batches}) == 4
    assert len({labels.tobytes() for _, labels in batches}) == 4


def test_labels_are_of_a_thousand_classes() -> None:
    labels = np.concatenate([labels for _, labels in FakeData(2, batch_size=500, size=(1, 1))])

    assert 0 <= labels.min() < 100
    assert 900 < labels.max() < 1000


def test_labels_are_of_so_many_classes_as_are_asked_for() -> None:
    fake = FakeData(4, batch_size=50, size=(1, 1), classes=10)

    assert {int(label) for _, labels in fake for label in labels} == set(range(10))
    assert fake.dataset.classes == tuple(f"class{n}" for n in range(10))
    assert len(FakeData(1, batch_size=1, size=(1, 1)).dataset.classes) == 1000


def test_the_records_of_the_dataset_are_those_of_the_batches() -> None:
    fake = FakeData(3, batch_size=4, size=(5, 7))
    for step, (images, labels) in enumerate(fake):
        for row in range(4):
            record = fake.dataset[4 * step + row]
            assert record.label == labels[row]
            assert (decode_rgb(record.image) == images[row]).all()


def test_a_cost_is_what_limits_and_its_advice_is_of_fake_data() -> None:
    fake = FakeData(3, batch_size=2, size=(1, 1), seconds=0.01)
    list(fake)

    verdict = fake.stats().verdict
    assert verdict is not None
    assert verdict.limit == "delay"
    assert "seconds=" in verdict.advice


def test_fake_data_pickles_to_few_bytes() -> None:
    fake = FakeData(3, batch_size=8, size=(64, 64), classes=3)
    next(iter(fake))

    assert len(ForkingPickler.dumps(fake)) < 500
    assert_same(epoch_of(copy.copy(fake)), epoch_of(fake))  # a copy is made as from the pickle


@pytest.mark.slow
def test_encoded_images_decode_and_are_as_large_as_imagenets() -> None:
    files = [file for images, _ in FakeData(5, batch_size=10, encoded=True) for file in images]
    sizes = [len(file) for file in files]

    assert len(set(map(bytes, files))) == 50
    assert all(isinstance(file, memoryview) and file.readonly for file in files)
    assert np.mean(sizes) == pytest.approx(110_000, rel=0.1)
    assert 0.3 < np.std(sizes) / np.mean(sizes) < 0.7
    for file in files:
        pixels = decode_rgb(file)
        assert 150 <= math.sqrt(pixels.shape[0] * pixels.shape[1]) <= 1000


@pytest.mark.slow
def test_encoded_batches_are_described_as_a_loaders_are(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=6, workers=0) as loader:
        specs = loader.batch_specs
    fake = FakeData(1, batch_size=6, encoded=True)

    assert fake.batch_specs == specs
    with pytest.raises(UsageError, match="fixed size"):
        fake.batch_bytes  # noqa: B018


@pytest.mark.slow
def test_a_record_costs_what_it_is_said_to() -> None:
    def elapsed(seconds: float) -> float:
        began = time.perf_counter()
        assert sum(1 for _ in FakeData(4, batch_size=5, size=(1, 1), seconds=seconds)) == 4
        return time.perf_counter() - began

    assert elapsed(0.01) >= 20 * 0.01
    assert elapsed(0.01) > elapsed(0.0)


def test_two_iterators_do_not_disturb_each_other() -> None:
    fake = FakeData(3, batch_size=4, size=(8, 8))
    one, other = iter(fake), iter(fake)

    pairs = [(next(one), next(other)) for _ in range(3)]

    assert_same([mine for mine, _ in pairs], [yours for _, yours in pairs])


def test_no_batches_are_no_batches() -> None:
    assert list(FakeData(0, batch_size=1)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"size": (0, 4)},
        {"seconds": -1.0},
        {"seconds": math.inf},
        {"seed": -1},
        {"batches": -1},
        {"classes": 0},
        {"seed": 1 << 64},
    ],
)
def test_what_cannot_be_meant_is_wrong_usage(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be at least"):
        FakeData(**({"batches": 1, "batch_size": 1} | options))
