"""torchvision's own transforms in a loader: all their randomness is the record's."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import BadImage, UsageError
from shardprep.loaders import ArraySpec, decode_rgb
from support.image_files import with_orientation
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on
from support.transform_examples import COFFEE, rng

ops = pytest.importorskip("support.torchvision_ops", exc_type=ImportError)

import torch  # noqa: E402
from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from shardprep.loaders.transforms.torchvision import Torchvision  # noqa: E402
from support.torchvision_ops import TRAINING, Here, threads_in_use, three_generators  # noqa: E402


def test_the_image_is_an_image_of_torchvision_in_rgb() -> None:
    seen: list[Any] = []

    Torchvision(seen.append)(COFFEE, rng())

    assert isinstance(seen[0], tv_tensors.Image)
    np.testing.assert_array_equal(seen[0].numpy().transpose(1, 2, 0), decode_rgb(COFFEE.image))


def test_the_image_may_be_a_pil_image() -> None:
    seen: list[Any] = []

    Torchvision(seen.append, image="pil")(COFFEE, rng())

    assert seen[0].mode == "RGB"
    np.testing.assert_array_equal(np.asarray(seen[0]), decode_rgb(COFFEE.image))


def test_a_result_is_what_torchvision_makes_with_the_same_seed() -> None:
    found = Torchvision(TRAINING)(COFFEE, rng(3))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng(3).integers(1 << 32, size=3, dtype=np.uint32)[2]))
        pixels = torch.from_numpy(decode_rgb(COFFEE.image)).permute(2, 0, 1)
        expected = TRAINING(tv_tensors.Image(pixels)).numpy()
    assert (type(found), found.dtype, found.shape) == (np.ndarray, np.float32, (3, 32, 32))
    np.testing.assert_array_equal(found, expected)


def test_the_same_record_gives_the_same_image_and_another_one_another() -> None:
    images = [Torchvision(TRAINING)(COFFEE, rng(record)).tobytes() for record in (1, 2, 1, 3, 2)]

    assert images[0] == images[2]
    assert images[1] == images[4]
    assert len(set(images)) == 3


def test_every_global_generator_is_seeded_and_restored() -> None:
    transform = Torchvision(three_generators)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    one, other = transform(COFFEE, rng(1)), transform(COFFEE, rng(1))

    np.testing.assert_equal(one, other)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), np.array([0x3FC0, 0xC000], np.uint16)),
        ((torch.ones(2), 3), (np.ones(2, np.float32), 3)),
        ({"mask": torch.zeros(2, 1, dtype=torch.bool)}, {"mask": np.zeros((2, 1), bool)}),
    ],
    ids=["bfloat16", "tuple", "dict"],
)
def test_tensors_become_arrays(made: Any, expected: Any) -> None:
    found = Torchvision(lambda image: made)(COFFEE, rng())

    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)


def test_a_pil_image_becomes_an_array() -> None:
    found = Torchvision(v2.CenterCrop(20), image="pil")(COFFEE, rng())

    assert (found.shape, found.dtype) == ((20, 20, 3), np.uint8)


def test_exif_orientation_is_applied_if_it_is_asked_for() -> None:
    turned = COFFEE._replace(image=with_orientation(COFFEE.image, 3))
    upright, upside_down = (
        Torchvision(v2.Identity(), orientation=how)(turned, rng()) for how in ("ignore", "apply")
    )

    np.testing.assert_array_equal(upright[:, ::-1, ::-1], upside_down)


def test_a_bad_image_names_its_record() -> None:
    with pytest.raises(BadImage, match="broken: does not decode"):
        Torchvision(TRAINING)(COFFEE._replace(key="broken", image=COFFEE.image[:9000]), rng())


def test_another_kind_of_image_is_refused() -> None:
    with pytest.raises(UsageError, match="'tensor' or 'pil'"):
        Torchvision(TRAINING, image="numpy")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="orientation must be"):
        Torchvision(TRAINING, orientation="upright")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="transform must be a callable"):
        Torchvision([TRAINING])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("image", ["tensor", "pil"])
def test_batches_are_the_same_for_any_number_of_workers(lmdb_shards: Path, image: Any) -> None:
    steps = TRAINING if image == "tensor" else v2.Compose([v2.PILToTensor(), TRAINING])
    epochs = []
    for workers in (0, 1, 2):
        with loader_on(
            lmdb_shards, transform=Here(steps, image=image), workers=workers, batch_size=50
        ) as loader:
            epochs.append(epoch_of(loader))
            assert_exactly_once(loader, epochs[-1])

    assert epochs[0][0][0].shape == (50, 3, 32, 32)
    assert_same(epochs[0], epochs[1])
    assert_same(epochs[0], epochs[2])


@pytest.mark.slow
def test_a_worker_of_several_computes_in_one_thread(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=Here(threads_in_use), workers=1) as loader:
        assert {int(count) for threads, *_ in loader for count in threads} == {1}


def test_declared_outputs_are_those_of_the_loader(lmdb_shards: Path) -> None:
    transform = Torchvision(TRAINING, outputs=(ArraySpec("image", (3, 32, 32), "float32"),))

    with loader_on(lmdb_shards, transform=transform) as loader:
        assert loader.batch_specs[0].shape == (None, 3, 32, 32)
        images, *_ = next(iter(loader))

    assert images.shape == (10, 3, 32, 32)


def test_equal_transforms_have_equal_identities(lmdb_shards: Path) -> None:
    def identity(transform: Any) -> dict[str, str]:
        with loader_on(lmdb_shards, transform=transform) as loader:
            return loader.identity

    copy = pickle.loads(pickle.dumps(TRAINING))  # noqa: S301

    assert identity(Torchvision(TRAINING)) == identity(Torchvision(copy))
    assert identity(Torchvision(TRAINING)) != identity(Torchvision(TRAINING, orientation="apply"))
    assert identity(Torchvision(v2.CenterCrop(8))) != identity(Torchvision(v2.CenterCrop(9)))
