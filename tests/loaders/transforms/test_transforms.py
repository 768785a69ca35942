"""Transforms: the crops they draw, the pixels they write, and that both depend only on the generator."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace
from typing import NamedTuple

import cv2
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import BadImage, UsageError
from shardprep.formats.images.crop_ready import Crop
from shardprep.loaders.order.rng import record_rng
from shardprep.loaders.transforms.augment import CROP_DRAWS, ColorJitter, lighting_offset, random_crop
from shardprep.loaders.transforms.contract import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ArraySpec,
    PixelFormat,
    fill_rows,
    outputs_of,
)
from shardprep.loaders.transforms.decode import decode_rgb
from shardprep.loaders.transforms.transforms import EvalTransform, ImageTransform, TrainTransform
from support.pictures import photograph, png, with_orientation


class Example(NamedTuple):
    key: str
    label: int
    image: bytes


COFFEE = Example("coffee", 7, photograph("coffee.jpg"))
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
JITTERED = TrainTransform(64, color_jitter=ColorJitter(), lighting=0.1)
TRANSFORMS = [TrainTransform(64), JITTERED, EvalTransform(64, resize=73)]

draws = st.lists(st.floats(0, 1, exclude_max=True), min_size=CROP_DRAWS, max_size=CROP_DRAWS)
sides = st.integers(1, 3000)


def rng(record=0, epoch=0):
    return record_rng(1, epoch, record)


def example(pixels) -> Example:
    return Example("example", 0, png(pixels))


@given(width=sides, height=sides, draws=draws)
def test_a_crop_lies_in_the_image_and_is_never_empty(width, height, draws):
    x, y, w, h = random_crop(width, height, scale=SCALE, ratio=RATIO, draws=draws)

    assert 0 <= x < x + w <= width
    assert 0 <= y < y + h <= height


@given(width=st.integers(100, 3000), height=st.integers(100, 3000), draws=draws)
def test_a_crop_has_the_area_and_the_aspect_asked_for(width, height, draws):
    _, _, w, h = crop = random_crop(width, height, scale=SCALE, ratio=RATIO, draws=draws)

    assert RATIO[0] * 0.96 <= w / h <= RATIO[1] * 1.04  # whole pixels: the smallest crop is 25 wide
    if crop != random_crop(width, height, scale=(9, 9), ratio=RATIO, draws=draws):  # not the centre
        assert SCALE[0] * 0.94 <= w * h / (width * height) <= SCALE[1]


@given(width=sides, height=sides)
def test_a_crop_that_never_fits_is_the_largest_in_the_centre(width, height):
    crop = random_crop(width, height, scale=(9, 9), ratio=RATIO, draws=[0.5] * CROP_DRAWS)

    assert crop.width == width or crop.height == height
    assert abs(2 * crop.x + crop.width - width) <= 1
    assert abs(2 * crop.y + crop.height - height) <= 1


def test_crops_are_everywhere_and_of_every_size():
    drawn = [rng(record).random(CROP_DRAWS).tolist() for record in range(3000)]
    crops = [random_crop(480, 400, scale=SCALE, ratio=RATIO, draws=draws) for draws in drawn]
    shares = [c.width * c.height / (480 * 400) for c in crops]

    assert min(shares) < 0.1
    assert max(shares) > 0.9
    assert np.mean(shares) == pytest.approx(0.465, abs=0.03)  # the largest crops fit less often
    assert np.mean([c.x / (480 - c.width) for c in crops if c.width < 400]) == pytest.approx(0.5, abs=0.03)
    assert {type(side) for side in crops[0]} == {int}
    assert isinstance(crops[0], Crop)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_same_generator_gives_the_same_image(transform):
    np.testing.assert_array_equal(transform(COFFEE, rng(5)), transform(COFFEE, rng(5)))


@pytest.mark.parametrize("transform", TRANSFORMS[:2])
def test_records_and_epochs_are_augmented_differently(transform):
    images = {transform(COFFEE, rng(record, epoch)).tobytes() for record in range(4) for epoch in range(4)}

    assert len(images) == 16


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_every_layout_and_dtype_has_the_values_of_plain_numpy(transform, layout, dtype):
    plain = transform(COFFEE, rng(3))
    expected = plain if layout == "HWC" else plain.transpose(2, 0, 1)
    if dtype == "float32":
        mean, std = np.array(IMAGENET_MEAN), np.array(IMAGENET_STD)
        expected = (plain / 255 - mean) / std
        expected = expected if layout == "HWC" else expected.transpose(2, 0, 1)

    image = replace(transform, layout=layout, dtype=dtype)(COFFEE, rng(3))

    assert (image.shape, image.dtype) == (expected.shape, dtype)
    np.testing.assert_allclose(image, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_row_of_a_batch_is_filled_with_the_very_same_values(transform, layout, dtype):
    transform = replace(transform, layout=layout, dtype=dtype)
    (spec,) = outputs_of(transform)
    batch = np.full((3, *spec.shape), 77, spec.dtype)

    fill_rows(transform, COFFEE, rng(3), (batch[1],))

    np.testing.assert_array_equal(batch[1], transform(COFFEE, rng(3)))
    assert np.all(batch[[0, 2]] == 77)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_travels_to_a_worker(transform):
    transform.outputs  # noqa: B018 - a transform that has been used must travel, too
    copy = pickle.loads(pickle.dumps(transform))  # noqa: S301

    assert copy == transform
    np.testing.assert_array_equal(copy(COFFEE, rng(2)), transform(COFFEE, rng(2)))


def test_a_train_image_is_the_crop_resized_and_flipped():
    uniform = rng(4).random(1 + CROP_DRAWS).tolist()
    pixels = decode_rgb(COFFEE.image)
    height, width = pixels.shape[:2]
    x, y, w, h = random_crop(width, height, scale=SCALE, ratio=RATIO, draws=uniform[1:])
    expected = cv2.resize(pixels[y : y + h, x : x + w], (224, 224))
    if uniform[0] < 0.5:
        expected = expected[:, ::-1]

    np.testing.assert_array_equal(TrainTransform()(COFFEE, rng(4)), expected)


def test_half_of_the_images_are_flipped():
    ramp = example(np.dstack([np.tile(np.arange(0, 200, 2, np.uint8), (100, 1))] * 3))

    def flipped(transform):
        images = (transform(ramp, rng(record)) for record in range(1000))
        return sum(int(image[16, 0, 0]) > int(image[16, -1, 0]) for image in images)

    assert 430 < flipped(TrainTransform(32)) < 570
    assert flipped(TrainTransform(32, flip=False)) == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (2, 3), (3, 500)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tiny_and_thin_images_are_images(transform, shape):
    pixels = np.full((*shape, 3), 90, np.uint8)

    image = transform(example(pixels), rng())

    assert image.shape == (64, 64, 3)


@pytest.mark.parametrize("transform", [TrainTransform(48), EvalTransform(48, resize=50)])
def test_a_gray_image_has_three_equal_channels(transform):
    image = transform(Example("gray", 0, photograph("camera-gray.jpg")), rng())

    assert np.all(image == image[..., :1])


@pytest.mark.parametrize("transform", [TrainTransform, EvalTransform])
def test_exif_orientation_is_ignored_unless_it_is_asked_for(transform):
    turned = Example("turned", 0, with_orientation(COFFEE.image, 3))
    upside_down = example(decode_rgb(COFFEE.image)[::-1, ::-1, ::-1])

    ignoring, applying = transform(), transform(orientation="apply")
    np.testing.assert_array_equal(ignoring(turned, rng()), ignoring(COFFEE, rng()))
    np.testing.assert_array_equal(applying(turned, rng()), applying(upside_down, rng()))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_bad_image_names_its_record(transform):
    with pytest.raises(BadImage, match="broken: does not decode"):
        transform(Example("broken", 0, COFFEE.image[:9000]), rng())


@pytest.mark.parametrize("shape", [(100, 100), (100, 151), (333, 100)])
def test_the_eval_image_is_the_centre_of_the_resized_one(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    height, width = shape
    whole = cv2.resize(pixels, (width * 64 // 100, height * 64 // 100), interpolation=cv2.INTER_AREA)[
        ..., ::-1
    ]
    top, left = round((whole.shape[0] - 56) / 2), round((whole.shape[1] - 56) / 2)

    image = EvalTransform(56, resize=64)(example(pixels), rng())

    np.testing.assert_array_equal(image, whole[top : top + 56, left : left + 56])


def test_shrinking_twice_averages_and_does_not_alias():
    checkers = (np.indices((128, 128)).sum(axis=0) % 2 * 255).astype(np.uint8)
    record = example(np.dstack([checkers] * 3))
    whole = {"scale": (1, 1), "ratio": (1, 1)}

    assert np.ptp(TrainTransform(32, **whole)(record, rng())) <= 1
    assert np.ptp(EvalTransform(32, resize=32)(record, rng())) <= 1


@pytest.mark.parametrize(
    ("name", "method"),
    [("linear", cv2.INTER_LINEAR), ("cubic", cv2.INTER_CUBIC), ("area", cv2.INTER_AREA)],
)
def test_the_interpolation_can_be_chosen(name, method):
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), np.uint8)
    whole = TrainTransform(64, scale=(1, 1), ratio=(2 / 3, 2 / 3), flip=False, interpolation=name)

    image = whole(example(pixels[..., ::-1]), rng())

    np.testing.assert_array_equal(image, cv2.resize(pixels, (64, 64), interpolation=method))


@given(
    strengths=st.tuples(*[st.floats(0, 1)] * 3),
    draws=st.tuples(*[st.floats(0, 1)] * 3),
    seed=st.integers(0, 99),
)
def test_jitter_is_brightness_then_contrast_then_saturation(strengths, draws, seed):
    image = np.random.default_rng(seed).integers(0, 256, (6, 6, 3)).astype(float)
    luma = np.array([0.299, 0.587, 0.114])
    b, c, s = (max(0, 1 - x) + (1 + x - max(0, 1 - x)) * d for x, d in zip(strengths, draws, strict=True))

    expected = image * b
    expected = c * expected + (1 - c) * (expected @ luma).mean()
    expected = s * expected + (1 - s) * (expected @ luma)[..., np.newaxis]

    matrix = ColorJitter(*strengths).matrix(image.mean(axis=(0, 1)), draws)
    np.testing.assert_allclose(image @ matrix[:, :3].T + matrix[:, 3], expected, atol=1e-9)


def test_jitter_and_lighting_change_the_pixels_by_their_matrix():
    plain = TrainTransform(64)(COFFEE, rng(6))
    generator = rng(6)
    generator.random(1 + CROP_DRAWS)
    matrix = ColorJitter().matrix(plain.mean(axis=(0, 1)), generator.random(3))
    offset = matrix[:, 3] + lighting_offset(0.1 * generator.standard_normal(3))

    expected = np.clip(plain @ matrix[:, :3].T + offset, 0, 255)
    np.testing.assert_allclose(JITTERED(COFFEE, rng(6)), expected, atol=1.5)


def test_lighting_without_weight_changes_nothing():
    np.testing.assert_array_equal(lighting_offset([0, 0, 0]), [0, 0, 0])
    first = 255 * 0.2175 * np.array([-0.5675, -0.5808, -0.5836])
    np.testing.assert_allclose(lighting_offset([1, 0, 0]), first)


def gray_and_label(record, rng):
    return decode_rgb(record.image)[:2, :2].mean(axis=2), np.array([record.label])


class Declared:
    outputs = (ArraySpec("gray", (2, 2), "float64"), ArraySpec("label", (1,), "int64"))

    def __call__(self, record, rng):
        return gray_and_label(record, rng)


def test_any_callable_is_a_transform_of_any_size():
    assert outputs_of(gray_and_label) is None


def test_a_transform_without_fill_is_copied_into_its_rows():
    rows = tuple(np.zeros(spec.shape, spec.dtype) for spec in outputs_of(Declared()))

    fill_rows(Declared(), COFFEE, rng(), rows)

    np.testing.assert_array_equal(rows[0], gray_and_label(COFFEE, rng())[0])
    assert rows[1] == [7]


@pytest.mark.parametrize(
    "rows",
    [
        (np.zeros((2, 2)),),
        (np.zeros((2, 3)), np.zeros(1, np.int64)),
        (np.zeros((2, 2), np.float32), np.zeros(1, np.int64)),
    ],
    ids=["count", "shape", "dtype"],
)
def test_a_transform_that_returns_other_than_it_declares_is_named(rows):
    with pytest.raises(UsageError, match=r"coffee: .* declares .* returns float64\[2, 2\], int64\[1\]"):
        fill_rows(Declared(), COFFEE, rng(), rows)


def test_the_size_of_an_output_in_bytes():
    (plain,) = TrainTransform(224).outputs
    (planes,) = TrainTransform(224, dtype="float32", layout="CHW").outputs

    assert plain.nbytes == 150_528
    assert planes == ArraySpec("image", (3, 224, 224), "float32")
    assert planes.nbytes == 4 * 150_528


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": (64, 0)},
        {"size": (64,)},
        {"size": (64, 64.5)},
        {"size": "224"},
        {"size": 22.4},
        {"size": True},
        {"layout": "NWHC"},
        {"dtype": "float64"},
        {"dtype": ["uint8"]},
        {"std": (1, 1, 0)},
        {"mean": 0.5},
        {"interpolation": "nearest"},
        {"orientation": "upright"},
        {"scale": (0, 1)},
        {"scale": (0.5, 2)},
        {"scale": 0.5},
        {"scale": (0.1, 0.5, 1)},
        {"ratio": (2, 1)},
        {"flip": "no"},
        {"flip": 0.5},
        {"color_jitter": {"brightness": 0.4}},
        {"color_jitter": True},
        {"lighting": -0.1},
        {"lighting": "0.1"},
        {"lighting": (0.1,)},
        {"masks": 5},
        {"boxes": 5},
        {"boxes": "boxes", "max_boxes": 2.5},
        {"boxes": "boxes", "min_box": "0.1"},
    ],
    ids=str,
)
def test_options_that_cannot_be_meant_are_refused(options):
    with pytest.raises(UsageError, match=next(reversed(options))):
        TrainTransform(**options)


plain = st.none() | st.booleans() | st.integers(-3, 5000) | st.floats(-10, 10) | st.text(max_size=9)
anything = (
    plain
    | st.lists(plain, max_size=3).map(tuple)
    | st.lists(plain)
    | st.sampled_from(
        [
            np.float32(0.5),
            np.array([0.5, 1]),
            np.int64(9),
            math.nan,
            10**400,
            b"no",
            object,
            {},
            ColorJitter(),
            ["uint8"],
        ]
    )
)


@pytest.mark.slow
@settings(max_examples=1000)
@given(
    kind=st.sampled_from([TrainTransform, EvalTransform, ColorJitter, ArraySpec, PixelFormat]),
    values=st.lists(anything, min_size=3, max_size=3),
    data=st.data(),
)
def test_an_option_is_refused_where_the_transform_is_made_or_it_works(kind, values, data):
    names = data.draw(
        st.lists(st.sampled_from([field.name for field in fields(kind)]), max_size=3, unique=True)
    )
    options = dict(zip(names, values, strict=False))
    if kind is ArraySpec:
        options = {"name": "image", "shape": (2,), "dtype": "uint8"} | options
    try:
        made = kind(**options)
    except UsageError:
        return
    if kind is ColorJitter:
        made = TrainTransform(8, color_jitter=made)
    if (
        isinstance(made, ImageTransform)
        and not made.masks
        and made.boxes is None
        and made.outputs[0].nbytes < 1e6
    ):
        fill_rows(made, COFFEE, rng(), tuple(np.empty(spec.shape, spec.dtype) for spec in made.outputs))


def test_other_options_that_cannot_be_meant_are_refused():
    with pytest.raises(UsageError, match="resize"):
        EvalTransform(300)
    with pytest.raises(UsageError, match="resize"):
        EvalTransform((200, 300))
    with pytest.raises(UsageError, match="at least 0 and finite"):
        ColorJitter(contrast=-0.1)


def test_a_format_of_mean_zero_and_std_one_is_the_share_of_255():
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    out = np.empty((2, 4, 3), np.float32)

    PixelFormat(dtype="float32", mean=(0, 0, 0), std=(1, 1, 1)).write(image, out)

    np.testing.assert_allclose(out, image / 255, atol=1e-7)


lengths = st.integers(1, 90)
SMALL = example(np.random.default_rng(0).integers(0, 256, (70, 99, 3), np.uint8))


@settings(deadline=None, max_examples=30)
@given(height=lengths, width=lengths)
def test_a_size_is_the_height_and_the_width(height, width):
    size = (height, width)

    for transform in (TrainTransform(size), EvalTransform(size, resize=90)):
        image = transform(SMALL, rng())
        assert image.shape == transform.outputs[0].shape == (*size, 3)
    assert TrainTransform(size, layout="CHW").outputs[0].shape == (3, *size)


@settings(deadline=None, max_examples=30)
@given(side=lengths, record=st.integers(0, 9))
def test_one_number_is_a_square(side, record):
    for one, other in (
        (TrainTransform(side), TrainTransform((side, side))),
        (EvalTransform(side, resize=90), EvalTransform((side, side), resize=90)),
    ):
        np.testing.assert_array_equal(one(SMALL, rng(record)), other(SMALL, rng(record)))


@settings(deadline=None, max_examples=30)
@given(height=lengths, width=lengths)
def test_an_eval_image_is_the_centre_of_a_larger_one_of_the_same_parity(height, width):
    square = 90 - height % 2, 90 - width % 2
    whole = EvalTransform(square, resize=90)(SMALL, rng())
    top, left = ((side - own) // 2 for side, own in zip(square, (height, width), strict=True))

    image = EvalTransform((height, width), resize=90)(SMALL, rng())

    # torchvision's place of the centre is rounded to even: it may differ by one
    near = [whole[t : t + height, x : x + width] for t in (top, top + 1) for x in (left, left + 1)]
    assert any(np.array_equal(image, part) for part in near)


def test_a_train_image_of_a_size_is_the_crop_resized_to_it():
    uniform = rng(4).random(1 + CROP_DRAWS).tolist()
    pixels = decode_rgb(COFFEE.image)
    height, width = pixels.shape[:2]
    x, y, w, h = random_crop(width, height, scale=SCALE, ratio=RATIO, draws=uniform[1:])
    expected = cv2.resize(pixels[y : y + h, x : x + w], (160, 96), interpolation=cv2.INTER_LINEAR)

    image = TrainTransform((96, 160), flip=False, interpolation="linear")(COFFEE, rng(4))

    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [("NHWC", "HWC"), ("channels_last", "HWC"), ("NCHW", "CHW"), ("channels_first", "CHW")],
)
def test_a_layout_has_its_usual_names(transform, name, layout):
    one, other = (replace(transform, layout=each, dtype="float32") for each in (name, layout))

    assert one.outputs == other.outputs
    np.testing.assert_array_equal(one(COFFEE, rng(3)), other(COFFEE, rng(3)))


finite = st.floats(0, 1, width=32)
deviations = st.floats(1 / 8, 4, width=32)


@given(
    mean=st.tuples(finite, finite, finite),
    std=st.tuples(deviations, deviations, deviations),
    layout=st.sampled_from(["HWC", "CHW"]),
    seed=st.integers(0, 99),
)
def test_numbers_of_two_bytes_are_those_of_four_rounded_to_the_nearest(mean, std, layout, seed):
    image = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)

    def made(dtype):
        form = PixelFormat(layout, dtype, mean, std)
        out = np.empty(form.shape(5, 7), form.stored)
        form.write(image, out)
        return out

    exact, half, brain = made("float32"), made("float16"), made("bfloat16")
    np.testing.assert_array_equal(half, exact.astype(np.float16))
    assert (half.dtype, brain.dtype) == (np.float16, np.uint16)
    np.testing.assert_array_equal(float32_of(brain), nearest_bfloat16(exact))


def float32_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearest_bfloat16(values):
    """The nearest of the two neighbours, by exact differences; the even one in the middle."""
    below = values.view(np.uint32) >> 16
    low, high = float32_of(below), float32_of(below + 1)
    to_low, to_high = np.abs(np.float64(values) - low), np.abs(np.float64(high) - values)
    takes_low = (to_low < to_high) | ((to_low == to_high) & (below % 2 == 0))
    return np.where(takes_low, low, high)


@pytest.mark.parametrize(
    ("transform", "shown"),
    [
        (TrainTransform(), "TrainTransform(224)"),
        (TrainTransform((64, 32), dtype="float32"), "TrainTransform((64, 32), dtype='float32')"),
        (EvalTransform(64, resize=72), "EvalTransform(64, resize=72)"),
    ],
)
def test_a_transform_shows_the_call_that_makes_it(
    transform: TrainTransform | EvalTransform, shown: str
) -> None:
    assert repr(transform) == shown
    assert eval(shown) == transform  # noqa: S307 - a text of this test
