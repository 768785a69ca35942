"""albumentations' own transforms in a loader: all their randomness is the record's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import decode_rgb
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on
from support.transform_examples import COFFEE, rng

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # or its import asks the package index
A = pytest.importorskip("albumentations", exc_type=ImportError)

from shardprep.loaders.transforms.albumentations import Albumentations  # noqa: E402

STEPS = [
    A.RandomResizedCrop((32, 32)),
    A.OneOf([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)], p=0.7),
    A.RandomBrightnessContrast(p=0.5),
    A.Normalize(),
]


def test_the_image_is_decoded_to_rgb() -> None:
    found = Albumentations(A.NoOp())(COFFEE, rng())

    np.testing.assert_array_equal(found, decode_rgb(COFFEE.image))


def test_the_same_record_gives_the_same_image_and_another_one_another() -> None:
    transform = Albumentations(A.Compose(STEPS))
    images = [transform(COFFEE, rng(record)) for record in (1, 2, 1, 3, 2)]
    others = Albumentations(A.Compose(STEPS, seed=5))

    np.testing.assert_array_equal(images[0], images[2])
    np.testing.assert_array_equal(images[1], images[4])
    np.testing.assert_array_equal(images[1], others(COFFEE, rng(2)))
    assert (images[0].shape, images[0].dtype) == ((32, 32, 3), np.float32)
    assert len({image.tobytes() for image in images}) == 3


def test_each_step_has_draws_of_its_own() -> None:
    """With one seed for all of them, an image would be flipped both ways or not at all."""
    transform = Albumentations(A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)]))
    pixels = decode_rgb(COFFEE.image)
    turned = [pixels, pixels[:, ::-1], pixels[::-1], pixels[::-1, ::-1]]
    images = [transform(COFFEE, rng(record)) for record in range(30)]

    counts = [sum(np.array_equal(image, each) for image in images) for each in turned]
    assert sum(counts) == 30
    assert min(counts) > 0


@pytest.mark.parametrize(
    "options", [{"transform": [A.HorizontalFlip()]}, {"orientation": 1}, {"outputs": "image"}], ids=str
)
def test_options_of_another_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Albumentations(**({"transform": A.Compose([])} | options))


def test_a_bad_image_names_its_record() -> None:
    with pytest.raises(BadImage, match="broken: does not decode"):
        Albumentations(A.NoOp())(COFFEE._replace(key="broken", image=COFFEE.image[:9000]), rng())


@pytest.mark.slow
def test_batches_are_the_same_for_any_number_of_workers(lmdb_shards: Path) -> None:
    epochs = []
    for workers in (0, 1, 2):
        transform = Albumentations(A.Compose(STEPS))
        with loader_on(lmdb_shards, transform=transform, workers=workers, batch_size=50) as loader:
            epochs.append(epoch_of(loader))
            assert_exactly_once(loader, epochs[-1])

    assert epochs[0][0][0].shape == (50, 32, 32, 3)
    assert_same(epochs[0], epochs[1])
    assert_same(epochs[0], epochs[2])


def test_a_tensor_becomes_an_array() -> None:
    pytest.importorskip("torch")
    to_tensor = pytest.importorskip("albumentations.pytorch", exc_type=ImportError).ToTensorV2()

    found = Albumentations(A.Compose([A.CenterCrop(20, 30), to_tensor]))(COFFEE, rng())

    assert (type(found), found.shape, found.dtype) == (np.ndarray, (3, 20, 30), np.uint8)


def test_equal_transforms_have_equal_identities(lmdb_shards: Path) -> None:
    def identity(transform: Any) -> dict[str, str]:
        with loader_on(lmdb_shards, transform=Albumentations(transform)) as loader:
            return loader.identity

    one, other = (identity(A.Compose(STEPS, seed=seed)) for seed in (None, None))

    assert one == other
    assert one != identity(A.Compose(STEPS[:3]))
