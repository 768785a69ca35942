"""What docs/training/augmentation.md says to write instead of tensorpack's augmentors does what it says."""

import re
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep import ColorJitter, EvalTransform, TrainTransform
from shardprep.formats.images.header import EXTREME_ASPECT
from shardprep.formats.records.record import Record
from support.image_files import with_orientation
from support.repository import ROOT
from support.tensorpack_page import entry_of, started

PAGE = (ROOT / "docs" / "training" / "augmentation.md").read_text()
ROWS = [entry_of(row) for row in re.findall(r"^\| `.*$", PAGE, re.M)]
Names = dict[str, Any]


@pytest.fixture
def names() -> Names:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    return started(program)


def is_composed(flow: Any, names: Names) -> bool:
    """Whether about half of the images are flipped and all have another brightness, the same each time."""
    one, again = ([image for image, _ in flow.at_pass(0)] for _ in range(2))
    other = [image for image, _ in flow.at_pass(1)]
    images = names["images"]
    turned = sum(
        _differ(found, image) > _differ(found[:, ::-1], image)
        for found, image in zip(one, images, strict=True)
    )
    return 25 < turned < 75 and np.array_equal(one, again) and not np.array_equal(one, other)


def _differ(one: Any, other: Any) -> float:
    return float(np.abs(one - one.mean() - (other - other.mean())).mean())


def is_part(found: Any, names: Names) -> bool:
    """Whether the image is a rectangle of 40 x 50 of the original."""
    image = names["image"]
    places = [(y, x) for y in range(21) for x in range(31)]
    return found.shape == (40, 50, 3) and any(
        np.array_equal(found, image[y : y + 40, x : x + 50]) for y, x in places
    )


def is_flipped(found: Any, names: Names) -> bool:
    image, rng = names["image"], np.random.default_rng(1)
    some = [names["flip"](image, rng) for _ in range(40)]
    kinds = [np.array_equal(each, image[:, ::-1]) for each in some]
    return 5 < sum(kinds) < 35 and all(
        flipped or each is image for flipped, each in zip(kinds, some, strict=True)
    )


def is_brighter(found: Any, names: Names) -> bool:
    """Whether one number was added to all values that were not clipped."""
    added = (found.astype(int) - names["image"])[(found > 0) & (found < 255)]
    return added.min() >= -63 and added.max() <= 63 and added.max() - added.min() <= 1


def is_scaled(found: Any, names: Names) -> bool:
    image = names["image"]
    inside = (found > 0) & (found < 255) & (image > 100)
    factors = found[inside] / image[inside]
    return bool(factors.min() >= 0.58 and factors.max() <= 1.42 and np.ptp(factors) < 0.02)


def has_other_contrast(found: Any, names: Names) -> bool:
    image = names["image"]
    mean = image.mean((0, 1))
    inside = (found > 0) & (found < 255) & (np.abs(image - mean) > 50)
    factors = ((found - mean) / np.where(inside, image - mean, 1))[inside]
    return bool(factors.min() >= 0.57 and factors.max() <= 1.43 and np.ptp(factors) < 0.03)


def keeps_gray(found: Any, names: Names) -> bool:
    """Whether a gray image stays, and a colour moves towards or away from its gray."""
    gray = np.repeat(names["image"][:, :, :1], 3, axis=2)
    same = names["saturation"](gray, np.random.default_rng(0))
    return (
        np.array_equal(same, gray) and found.shape == gray.shape and not np.array_equal(found, names["image"])
    )


def is_any_order(found: Any, names: Names) -> bool:
    seen = []
    steps = [lambda image, rng, n=n: seen.append(n) or image for n in range(3)]
    for seed in range(30):
        names["in_any_order"](*steps)(names["image"], np.random.default_rng(seed))
    orders = {tuple(seen[first : first + 3]) for first in range(0, 90, 3)}
    return (
        found.dtype == np.uint8 and len(orders) == 6 and all(sorted(order) == [0, 1, 2] for order in orders)
    )


def is_sometimes(found: Any, names: Names) -> bool:
    rng = np.random.default_rng(0)
    done = [names["sometimes"](lambda image, rng: None, 0.3)(names["image"], rng) is None for _ in range(200)]
    return found.shape == names["image"].shape and 30 < sum(done) < 90


def transforms_to(expected: Any) -> Callable[[Any, Names], bool]:
    """A check that a transform equals the expected one, and makes an image of its size."""

    def check(found: Any, names: Names) -> bool:
        encoded = cv2.imencode(".jpg", names["image"])[1].tobytes()
        made = found(Record("key", 0, encoded), np.random.default_rng(0))
        return bool(found == expected) and made.shape == (expected.size, expected.size, 3)

    return check


def shortest_edge_of_tensorpack(image: Any, size: int, interpolation: int = cv2.INTER_LINEAR) -> Any:
    """What tensorpack 0.11's ResizeShortestEdge makes, by its own arithmetic."""
    h, w = image.shape[:2]
    scale = size * 1.0 / min(h, w)
    newh, neww = (size, int(scale * w + 0.5)) if h < w else (int(scale * h + 0.5), size)
    return cv2.resize(image, (neww, newh), interpolation=interpolation)


FBRESNET = EvalTransform(224, resize=256, interpolation="cubic", rounding="tensorpack", orientation="apply")

CHECKS: dict[str, Callable[[Any, Names], bool]] = {
    "imgaug.AugmentorList": is_composed,
    "imgaug.Resize": lambda found, names: found.shape == (64, 48, 3),
    "imgaug.ResizeShortestEdge": lambda found, names: np.array_equal(
        found, shortest_edge_of_tensorpack(names["image"], 32)
    ),
    "imgaug.RandomCrop": is_part,
    "imgaug.CenterCrop": lambda found, names: np.array_equal(found, names["image"][10:50, 15:65]),
    "imgaug.Flip": is_flipped,
    "imgaug.Brightness": is_brighter,
    "imgaug.BrightnessScale": is_scaled,
    "imgaug.Contrast": has_other_contrast,
    "imgaug.Saturation": keeps_gray,
    "imgaug.Lighting": transforms_to(TrainTransform(32, lighting=0.1)),
    "imgaug.RandomOrderAug": is_any_order,
    "imgaug.RandomApplyAug": is_sometimes,
    "imgaug.GoogleNetRandomCropAndResize": transforms_to(
        TrainTransform(32, scale=(0.08, 1), ratio=(3 / 4, 4 / 3), flip=False, interpolation="cubic")
    ),
    "fbresnet_augmentor True": transforms_to(
        TrainTransform(224, interpolation="cubic", color_jitter=ColorJitter(0.4, 0.4, 0.4), lighting=0.1)
    ),
    "fbresnet_augmentor False": transforms_to(FBRESNET),
}


def test_every_row_has_a_check_and_every_check_a_row() -> None:
    assert [row.names[0] for row in ROWS] == [name.split()[0] for name in CHECKS]
    assert all(len(row.expressions) == 1 for row in ROWS)


@pytest.mark.parametrize("name", CHECKS)
def test_what_to_write_does_what_the_page_says(name: str, names: Names) -> None:
    assert CHECKS[name](ROWS[list(CHECKS).index(name)].run(names).value, names)


@pytest.mark.slow
@settings(max_examples=40)
@given(height=st.integers(20, 700), width=st.integers(20, 700), is_turned=st.booleans())
def test_the_centre_is_that_of_tensorpack_to_the_pixel(height: int, width: int, is_turned: bool) -> None:
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    encoded = cv2.imencode(".jpg", image)[1].tobytes()
    encoded = with_orientation(encoded, 6) if is_turned else encoded
    read = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    resized = shortest_edge_of_tensorpack(read, 256, cv2.INTER_CUBIC)
    top, left = (int((side - 224) * 0.5) for side in resized.shape[:2])

    found = FBRESNET(Record("key", 0, encoded), np.random.default_rng(0))

    different = np.abs(found.astype(int) - resized[top : top + 224, left : left + 224, ::-1]).max()
    is_extreme = max(height, width) > EXTREME_ASPECT * min(height, width)
    assert different <= is_extreme  # by rounding, as documented
