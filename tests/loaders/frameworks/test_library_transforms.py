"""Transforms of albumentations and of torchvision in a loader: all their randomness is the record's."""

import os
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardprep import ColorJitter, TrainTransform, Views, open_dataset
from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import ArraySpec, decode_rgb
from shardprep.loaders.transforms.decode import EncodedImage
from support.image_files import with_orientation
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on
from support.transform_examples import COFFEE, rng

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # or its import asks the package index


class Library(NamedTuple):
    """What wraps a library's transforms, and three of these; one changes nothing, and one flips at random."""

    wrap: Callable[..., Any]
    training: Any
    nothing: Any
    shape: tuple[int, ...]  # of what the training's returns, in float32
    flip: Any = None


def albumentations() -> Library:
    made = pytest.importorskip("albumentations", exc_type=ImportError)
    from shardprep.loaders.transforms.albumentations import Albumentations

    flip = made.OneOf([made.HorizontalFlip(p=0.5), made.VerticalFlip(p=0.5)], p=0.7)
    steps = [made.RandomResizedCrop((32, 32)), flip, made.RandomBrightnessContrast(p=0.5), made.Normalize()]
    return Library(Albumentations, made.Compose(steps), made.NoOp(), (32, 32, 3), made.HorizontalFlip())


def torchvision() -> Library:
    ops = pytest.importorskip("support.torchvision_ops", exc_type=ImportError)

    return Library(ops.Here, ops.TRAINING, ops.v2.Identity(), (3, 32, 32), ops.v2.RandomHorizontalFlip())


def torchvision_of_pil() -> Library:
    wrap, training, nothing, shape, _ = torchvision()
    from torchvision.transforms import v2

    return Library(partial(wrap, image="pil"), v2.Compose([v2.PILToTensor(), training]), nothing, shape)


@pytest.fixture(params=[albumentations, torchvision], ids=lambda make: make.__name__)
def library(request: pytest.FixtureRequest) -> Library:
    made: Library = request.param()
    return made


def test_the_same_record_gives_the_same_image_and_another_one_another(library: Library) -> None:
    transform = library.wrap(library.training)
    images = [transform(COFFEE, rng(record)) for record in (1, 2, 1, 3, 2)]

    assert {(image.shape, image.dtype) for image in images} == {(library.shape, np.dtype(np.float32))}
    np.testing.assert_array_equal(images[0], images[2])
    np.testing.assert_array_equal(images[1], images[4])
    assert len({image.tobytes() for image in images}) == 3


def test_the_image_is_decoded_to_rgb_and_turned_if_that_is_asked_for(library: Library) -> None:
    turned = COFFEE._replace(image=with_orientation(COFFEE.image, 3))
    upright, upside_down = (
        library.wrap(library.nothing, orientation=how)(turned, rng()) for how in ("ignore", "apply")
    )
    if library.shape[0] == 3:
        upright, upside_down = (image.transpose(1, 2, 0) for image in (upright, upside_down))

    np.testing.assert_array_equal(upright, decode_rgb(COFFEE.image))
    np.testing.assert_array_equal(upright[::-1, ::-1], upside_down)


@pytest.mark.parametrize(
    "options",
    [
        *({"transform": [1]}, {"orientation": 1}, {"orientation": "upright"}, {"outputs": "image"}),
        *(
            {"crop": each}
            for each in (8, TrainTransform(8, layout="CHW"), TrainTransform(8, dtype="float32"))
        ),
        *({"crop": TrainTransform(8), "orientation": "apply"}, {"crop": TrainTransform(8, masks=("mask",))}),
    ],
    ids=str,
)
def test_options_of_another_kind_are_refused(library: Library, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        library.wrap(**({"transform": library.nothing} | options))


def test_a_transform_gets_the_crop_that_is_made_first(library: Library, lmdb_shards: Path) -> None:
    crop = TrainTransform(20)
    transform = library.wrap(library.nothing, crop=crop)
    with loader_on(lmdb_shards, transform=transform) as one, loader_on(lmdb_shards, transform=crop) as other:
        found, expected = one.replay(0, 0), other.replay(0, 0)

    images = found.batch[0] if library.shape[0] > 3 else np.moveaxis(found.batch[0], 1, 3)
    np.testing.assert_array_equal(images, expected.batch[0])
    assert found.records == expected.records  # with the crops shown
    assert transform.identity != library.wrap(library.nothing, crop=TrainTransform(21)).identity


def test_views_decode_once_for_all_crops_and_are_those_of_each_transform_alone(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, jitter = ArraySpec("image", library.shape, "uint8"), ColorJitter(0.4, 0.4, 0.4)
    crops = [TrainTransform(32, interpolation="linear", color_jitter=one) for one in (None, jitter)]
    each = [library.wrap(library.flip, crop=crop, outputs=(spec,)) for crop in crops]
    draws = [np.random.Philox(key=[5, 6], counter=[0, view, 0, 0]) for view in (0, 0, 1)]
    first, *streams = map(np.random.Generator, draws)
    alone = [one(COFFEE, own) for one, own in zip(each, streams, strict=True)]
    decoded, decode = [], EncodedImage._decode
    monkeypatch.setattr(EncodedImage, "_decode", lambda self, *a: decoded.append(a) or decode(self, *a))

    np.testing.assert_array_equal(Views(each)(COFFEE, first), alone)
    assert len(decoded) == 1


@pytest.mark.parametrize("make", [loader_on, open_dataset])
def test_a_transform_without_its_wrapper_is_refused(
    library: Library, lmdb_shards: Path, make: Callable[..., Any]
) -> None:
    with pytest.raises(UsageError, match=r"takes an image: give [AT]\w+\(transform\), from shardprep"):
        make(lmdb_shards, transform=library.training)


def test_a_bad_image_names_its_record(library: Library) -> None:
    broken = COFFEE._replace(key="broken", image=COFFEE.image[:9000])

    with pytest.raises(BadImage, match="broken: does not decode"):
        library.wrap(library.nothing)(broken, rng())


@pytest.mark.slow
@pytest.mark.parametrize("library", [albumentations, torchvision, torchvision_of_pil], indirect=True)
def test_batches_are_the_same_for_any_number_of_workers(library: Library, lmdb_shards: Path) -> None:
    epochs = []
    for workers in (0, 1, 2):
        transform = library.wrap(library.training)
        with loader_on(lmdb_shards, transform=transform, workers=workers, batch_size=50) as loader:
            epochs.append(epoch_of(loader))
            assert_exactly_once(loader, epochs[-1])

    assert epochs[0][0][0].shape == (50, *library.shape)
    assert_same(epochs[0], epochs[1])
    assert_same(epochs[0], epochs[2])


def test_declared_outputs_are_those_of_the_loader(library: Library, lmdb_shards: Path) -> None:
    transform = library.wrap(library.training, outputs=(ArraySpec("image", library.shape, "float32"),))

    with loader_on(lmdb_shards, transform=transform) as loader:
        assert loader.batch_specs[0].shape == (None, *library.shape)
        images, *_ = next(iter(loader))

    assert images.shape == (10, *library.shape)


def test_equal_transforms_have_equal_identities(library: Library, lmdb_shards: Path) -> None:
    def identity(transform: Any, **options: Any) -> dict[str, str]:
        with loader_on(lmdb_shards, transform=library.wrap(transform, **options)) as loader:
            return loader.identity

    copy = pickle.loads(pickle.dumps(library.training))  # noqa: S301

    assert identity(library.training) == identity(copy)
    assert identity(library.training) != identity(library.nothing)
    assert identity(library.training) != identity(library.training, orientation="apply")


def test_each_step_of_albumentations_has_draws_of_its_own() -> None:
    """With one seed for all of them, an image would be flipped both ways or not at all."""
    wrap, A = albumentations().wrap, pytest.importorskip("albumentations")  # noqa: N806 - as it is called
    flips = [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)]
    transform, seeded = (wrap(A.Compose(flips, seed=seed)) for seed in (None, 5))
    pixels = decode_rgb(COFFEE.image)
    turned = [pixels, pixels[:, ::-1], pixels[::-1], pixels[::-1, ::-1]]
    images = [transform(COFFEE, rng(record)) for record in range(30)]

    counts = [sum(np.array_equal(image, each) for image in images) for each in turned]
    assert (sum(counts), min(counts) > 0) == (30, True)
    np.testing.assert_array_equal(images[2], seeded(COFFEE, rng(2)))


def test_a_tensor_of_albumentations_becomes_an_array_and_boxes_are_refused() -> None:
    wrap, A = albumentations().wrap, pytest.importorskip("albumentations")  # noqa: N806
    pytest.importorskip("torch")
    to_tensor = pytest.importorskip("albumentations.pytorch", exc_type=ImportError).ToTensorV2()

    found = wrap(A.Compose([A.CenterCrop(20, 30), to_tensor]))(COFFEE, rng())

    assert (type(found), found.shape, found.dtype) == (np.ndarray, (3, 20, 30), np.uint8)
    with pytest.raises(UsageError, match="transform gets no boxes or keypoints: call it in a function of"):
        wrap(A.Compose([A.Transpose()], bbox_params=A.BboxParams("coco")))


def test_torchvision_is_given_an_image_of_its_own_or_of_pil() -> None:
    wrap = torchvision().wrap
    from torchvision import tv_tensors

    seen: list[Any] = []
    for options in ({}, {"image": "pil"}):
        wrap(seen.append, **options)(COFFEE, rng())

    assert isinstance(seen[0], tv_tensors.Image)
    assert seen[1].mode == "RGB"
    for found in (seen[0].numpy().transpose(1, 2, 0), seen[1]):
        np.testing.assert_array_equal(np.asarray(found), decode_rgb(COFFEE.image))
    with pytest.raises(UsageError, match="'tensor' or 'pil'"):
        wrap(seen.append, image="numpy")


def test_a_result_is_what_torchvision_makes_with_the_same_seed() -> None:
    wrap, training, *_ = torchvision()
    import torch
    from torchvision import tv_tensors

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng(3).integers(1 << 32, size=3, dtype=np.uint32)[2]))
        pixels = torch.from_numpy(decode_rgb(COFFEE.image)).permute(2, 0, 1)
        expected = training(tv_tensors.Image(pixels)).numpy()

    np.testing.assert_array_equal(wrap(training)(COFFEE, rng(3)), expected)


def test_every_global_generator_is_seeded_and_restored() -> None:
    wrap = torchvision().wrap
    import torch

    from support.torchvision_ops import three_generators

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    one, other = (wrap(three_generators)(COFFEE, rng(1)) for _ in range(2))

    np.testing.assert_equal(one, other)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_tensors_and_pil_images_become_arrays() -> None:
    wrap = torchvision().wrap
    import torch
    from torchvision.transforms import v2

    cases: list[tuple[Any, Any]] = [
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), np.array([0x3FC0, 0xC000], np.uint16)),
        ((torch.ones(2), 3), (np.ones(2, np.float32), 3)),
        ({"mask": torch.zeros(2, 1, dtype=torch.bool)}, {"mask": np.zeros((2, 1), bool)}),
    ]
    for made, expected in cases:
        found = wrap(lambda image, made=made: made)(COFFEE, rng())
        assert type(found) is type(expected)
        np.testing.assert_equal(found, expected)
    found = wrap(v2.CenterCrop(20), image="pil")(COFFEE, rng())
    assert (found.shape, found.dtype) == ((20, 20, 3), np.uint8)


@pytest.mark.slow
def test_a_worker_of_several_computes_in_one_thread(lmdb_shards: Path) -> None:
    wrap = torchvision().wrap
    from support.torchvision_ops import threads_in_use

    with loader_on(lmdb_shards, transform=wrap(threads_in_use), workers=1) as loader:
        assert {int(count) for threads, *_ in loader for count in threads} == {1}
