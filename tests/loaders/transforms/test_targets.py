"""Masks and boxes: the crop and the turn of the image, held against pixels that know their place."""

from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import BadImage, BadTarget, UsageError
from shardprep.formats.images.crop_ready import make_crop_ready
from shardprep.formats.images.header import read_image_header
from shardprep.loaders.transforms.geometry import Span
from shardprep.loaders.transforms.targets import visible_boxes
from shardprep.loaders.transforms.transforms import EvalTransform, TrainTransform
from support.image_files import chunk, encoded, exif_of, numbers_png, with_orientation
from support.transform_examples import COFFEE, Example, rng


def ramps(width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks of each pixel's place along x and along y, 0 to 255."""
    x, y = np.meshgrid(np.arange(width) * 256 // width, np.arange(height) * 256 // height)
    return x.astype(np.uint8), y.astype(np.uint8)


def placed(width: int, height: int, *, kind: str = "png", orientation: int = 1) -> Example:
    """An image with red and green the same as the masks "x" and "y", and a box with the mask "box"."""
    x, y = ramps(width, height)
    pixels = cv2.merge([np.full_like(x, 99), y, x])
    if kind == "png":
        image = encoded(pixels, ".png")
        image = image[:33] + chunk(b"eXIf", exif_of(orientation)) + image[33:]
    else:
        options = [cv2.IMWRITE_JPEG_QUALITY, 98, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x111111]
        image = with_orientation(cv2.imencode(".jpg", pixels, options)[1].tobytes(), orientation)
    if kind == "crop-ready":
        image = make_crop_ready(image, read_image_header(image))
    left, top, right, bottom = width // 4, height // 8, width * 3 // 4, height * 5 // 8
    boxes = np.array([[left / width, top / height, right / width, bottom / height]], np.float32)
    box = np.zeros((height, width), np.uint8)
    box[top:bottom, left:right] = 1
    columns = {"x": x, "y": y, "box": box, "boxes": boxes, "box_labels": np.array([5], np.int32)}
    return Example("placed", 0, image, columns, kind == "crop-ready")


TARGETS: dict[str, Any] = {
    "masks": ("x", "y", "box"),
    "boxes": "boxes",
    "box_labels": "box_labels",
    "max_boxes": 3,
}
kinds = st.sampled_from(["png", "jpeg", "crop-ready"])
sides = st.integers(40, 700)


@settings(max_examples=50, deadline=None)
@given(
    kind=kinds,
    width=sides,
    height=sides,
    orientation=st.integers(1, 8),
    applied=st.sampled_from(["ignore", "apply"]),
    transform=st.sampled_from([
        TrainTransform(32), TrainTransform((24, 56)), EvalTransform(32, resize=36), EvalTransform((48, 20), resize=90),
    ]),
    record=st.integers(0, 1000),
)  # fmt: skip
def test_every_pixel_of_a_mask_is_that_of_the_image(
    kind: str, width: int, height: int, orientation: int, applied: Any, transform: Any, record: int
) -> None:
    sample = placed(width, height, kind=kind, orientation=orientation)
    transform = replace(transform, **TARGETS, orientation=applied, min_box=0, box_units="pixels")

    image, x, y, box, boxes, _, count = transform(sample, rng(record))

    # The image is nowhere further from the mask than half a pixel of the source, and a rounding.
    for plane, mask, side in ((0, x, width), (1, y, height)):
        apart = image[..., plane].astype(float) - mask
        level = 256 / side  # the difference between pixels beside each other
        noise = 1.6 if kind == "png" else 4
        assert np.abs(apart[1:-1, 1:-1]).max() <= max(level, 1) + noise
        assert abs(np.median(apart)) <= max(level, 1) / 2 + noise / 2
    assert_shows(box == 1, boxes[:count])


def assert_shows(inside: np.ndarray, boxes: np.ndarray) -> None:
    """Hold a box, in pixels of the result, against the pixels that lie in it."""
    height, width = inside.shape
    cx, cy = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    found, near = np.zeros_like(inside), np.zeros_like(inside)
    for left, top, right, bottom in boxes:
        found |= (cx > left) & (cx < right) & (cy > top) & (cy < bottom)
        for centre, edges in ((cx, (left, right)), (cy, (top, bottom))):
            near |= np.min([np.abs(centre - edge) for edge in edges], axis=0) < 1e-3
    np.testing.assert_array_equal(inside & ~near, found & ~near)


@settings(max_examples=25, deadline=None)
@given(record=st.integers(0, 10_000), kind=kinds, blocks=st.integers(2, 6))
def test_a_mask_of_regions_has_the_colour_of_each_regions_inside(record: int, kind: str, blocks: int) -> None:
    random = np.random.default_rng(record)
    numbers = np.kron(random.permutation(blocks**2).reshape(blocks, -1), np.ones((48, 56))).astype(np.uint8)
    colours = np.stack(np.meshgrid(*[[0, 90, 180, 255]] * 3), -1).reshape(-1, 3)
    palette = random.permutation(colours).astype(np.uint8)
    pixels = np.ascontiguousarray(palette[numbers][..., ::-1])
    form: list[Any] = [".png"] if kind == "png" else [".jpg", cv2.IMWRITE_JPEG_QUALITY, 97]
    image = encoded(pixels, *form)
    if kind == "crop-ready":
        image = make_crop_ready(image, read_image_header(image))
    stored = numbers_png(numbers, bits={2: 2, 3: 4, 4: 4}.get(blocks, 8), palette=record % 2 == 0)
    sample = Example("regions", 0, image, {"mask": stored}, kind == "crop-ready")

    result, mask = TrainTransform(40, masks=["mask"])(sample, rng(record))

    reach = np.ones((5, 5), np.uint8)
    inside = cv2.erode(mask, reach) == cv2.dilate(mask, reach)
    inside[[0, -1]] = inside[:, [0, -1]] = False  # there a region may be narrower than a pixel of the mask
    expected = palette[mask[inside]].astype(int)
    assert np.abs(result[inside] - expected).max(initial=0) <= (2 if kind == "png" else 30)
    assert inside.any()


spans = st.builds(
    lambda side, low, share, resized, first, size, is_mirrored: Span(
        side, (start := int(low * (side - 1))), max(1, int(share * (side - start))), resized,
        max(1, min(size, resized)), int(first * (resized - max(1, min(size, resized)))), is_mirrored,
    ),
    st.integers(1, 300), st.floats(0, 1), st.floats(0, 1), st.integers(1, 300), st.floats(0, 1),
    st.integers(1, 300), st.booleans(),
)  # fmt: skip


corners = st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)).map(sorted)


@settings(max_examples=80)
@given(
    across=spans,
    down=spans,
    boxes=st.lists(st.tuples(corners, corners), max_size=6),
    least=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    most=st.integers(1, 6),
)
def test_boxes_are_those_of_a_slow_computation(
    across: Span, down: Span, boxes: list[Any], least: float, most: int
) -> None:
    given_boxes = np.array([[x[0], y[0], x[1], y[1]] for x, y in boxes], np.float64).reshape(-1, 4)

    kept, numbers = visible_boxes(given_boxes, across, down, least=least, most=most)

    expected = {}
    for number, (x, y) in enumerate(boxes):
        (left, right, seen_x), (top, bottom, seen_y) = shown_of(across, *x), shown_of(down, *y)
        whole = (x[1] - x[0]) * across.side * (y[1] - y[0]) * down.side
        if seen_x * seen_y > 0:
            expected[number] = (left, top, right, bottom), seen_x * seen_y, seen_x * seen_y / whole
    for number, box in zip(numbers.tolist(), kept, strict=True):
        place, _, share = expected[number]
        np.testing.assert_allclose(box, place, atol=1e-6 * max(across.resized, down.resized))
        assert share >= least * (1 - 1e-9)
    left_out = [each for number, each in expected.items() if number not in numbers]
    areas = [expected[number][1] for number in numbers.tolist()]
    for _, area, share in left_out:
        assert share <= least * (1 + 1e-9) + 1e-12 or (len(areas) == most and area <= min(areas) * (1 + 1e-9))
    assert numbers.tolist() == sorted(numbers.tolist())


def shown_of(span: Span, low: float, high: float) -> tuple[float, float, float]:
    """Where a range of fractions begins and ends in the result, and how many pixels of it are seen."""
    first = span.start + span.first * span.length / span.resized
    last = min(span.start + (span.first + span.size) * span.length / span.resized, span.side)
    seen = max(low * span.side, first), min(high * span.side, last)
    left, right = ((at - span.start) * span.resized / span.length - span.first for at in seen)
    if span.is_mirrored:
        left, right = span.size - right, span.size - left
    return left, right, max(0.0, seen[1] - seen[0])


BOXES = np.array([[0, 0, 0.5, 0.5], [0.4, 0.4, 0.6, 0.6], [0, 0, 1, 1], [0.5, 0.5, 0.5, 0.9]], np.float32)
WHOLE = EvalTransform((64, 64), resize=64, boxes="boxes")


@pytest.mark.parametrize(("least", "kept"), [(0, [0, 1]), (0.4, [0, 1]), (0.6, [1]), (1, [1])])
def test_a_box_is_left_out_if_less_than_the_share_of_it_is_left(least: float, kept: list[int]) -> None:
    image = encoded(np.zeros((64, 128, 3), np.uint8), ".png")
    three = np.array([[0, 0, 0.5, 1], [0.3, 0.1, 0.6, 0.9], [0, 0, 0.2, 1]], np.float32)
    wide = Example("wide", 0, image, {"boxes": three, "numbers": np.arange(3, dtype=np.int32)})

    _, boxes, numbers, count = replace(WHOLE, min_box=least, box_labels="numbers")(wide, rng())

    assert numbers[:count].tolist() == kept
    np.testing.assert_allclose(boxes[count - 1], [0.1, 0.1, 0.7, 0.9], rtol=1e-6)


def boxes_of(*boxes: Any) -> dict[str, Any]:
    return {"boxes": np.array(boxes, np.float32)}


def damaged(mask: bytes) -> bytes:
    return mask[:-20] + bytes([mask[-20] ^ 1]) + mask[-19:]


MASKED = TrainTransform(4, masks=("mask",))
LABELLED = replace(WHOLE, box_labels="labels")
SAMPLES, NO_MASK = np.zeros((4, 6), np.uint16), "bytes, which is not a mask"
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (MASKED, {"mask": numbers_png(SAMPLES, bits=16, palette=False)}, BadTarget, NO_MASK),
    (MASKED, {"mask": SAMPLES}, BadTarget, r"uint16\[4, 6\]"),
    (MASKED, {"mask": np.zeros((4, 6, 3), np.uint8)}, BadTarget, r"uint8\[4, 6, 3\]"),
    (MASKED, {"mask": encoded(np.zeros((4, 6, 3), np.uint8), ".png")}, BadTarget, NO_MASK),
    (MASKED, {"mask": COFFEE.image}, BadTarget, NO_MASK),
    (MASKED, {"mask": "text"}, BadTarget, "str"),
    (MASKED, {"mask": np.zeros((6, 4), np.uint8)}, BadTarget, "4x6 pixels, but the image has 6x4"),
    (MASKED, {"mask": damaged(numbers_png(np.zeros((4, 6), np.uint8)))}, BadImage, "CRC"),
    (WHOLE, boxes_of([0, 0, 1, 1], [0, 0, 100, 50]), BadTarget, r"\[0, 0, 100, 50\];.*divide pixels"),
    (WHOLE, boxes_of([0, 0, 1, 1], [0.6, 0, 0.4, 1]), BadTarget, r"boxes has the box \[0.6, 0"),
    (WHOLE, boxes_of([0, 0, np.nan, 1]), BadTarget, "boxes"),
    (WHOLE, {"boxes": np.zeros((2, 5), np.float32)}, BadTarget, "boxes"),
    (WHOLE, {"boxes": np.zeros((1, 4), np.int32)}, BadTarget, "boxes"),
    (WHOLE, {"boxes": [[0, 0, 1, 1]]}, BadTarget, "boxes"),
    (LABELLED, {"boxes": BOXES, "labels": np.zeros(3, np.int32)}, BadTarget, r"int32\[3\]; the labels of 4"),
    (LABELLED, {"boxes": BOXES, "labels": np.arange(4) << 31}, BadTarget, "labels has 2147483648, which"),
]


@pytest.mark.parametrize(
    ("transform", "columns", "error", "says"), WRONG, ids=[f"{n} {each[3]}" for n, each in enumerate(WRONG)]
)
def test_what_is_no_mask_and_no_box_of_the_image_is_an_error_with_the_key(
    transform: Any, columns: dict[str, Any], error: type[Exception], says: str
) -> None:
    sample = Example("the key", 0, encoded(np.zeros((4, 6, 3), np.uint8), ".png"), columns)

    with pytest.raises(error, match=says) as caught:
        transform(sample, rng())
    assert caught.value.key == "the key"  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="no column 'mask'; the columns that are read: boxes"):
        MASKED(sample._replace(columns=boxes_of()), rng())
