"""Of a resized image that is far longer than high, only the kept part is made, from the same grid."""

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats import UsageError
from shardprep.formats.images.info import EXTREME_ASPECT
from shardprep.formats.records.record import Record
from shardprep.loaders import EvalTransform, TrainTransform, decode_rgb
from shardprep.loaders.order.rng import record_rng
from shardprep.loaders.transforms.geometry import window_of
from shardprep.loaders.transforms.transforms import MAX_SIDE
from support.image_files import PHOTOGRAPHS, encoded, pixels

METHODS = {"linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC}
Image = npt.NDArray[np.uint8]


def whole(image: Image, size: int, resize: int, interpolation: str) -> Image:
    """The definition of the transform: resize the whole image, then cut out the centre."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    w, h = resize * width // shorter, resize * height // shorter
    auto = "area" if shorter > resize else "linear"
    method = METHODS[auto if interpolation == "auto" else interpolation]
    resized = cv2.resize(image, (w, h), interpolation=method)
    x, y = round((w - size) / 2), round((h - size) / 2)
    return np.asarray(resized[y : y + size, x : x + size], np.uint8)


def evaluated(image: Image, size: int, resize: int, interpolation: str) -> Image:
    transform = EvalTransform(size, resize=resize, interpolation=interpolation)  # type: ignore[arg-type]
    record = Record("key", 0, encoded(image[..., ::-1], ".png", cv2.IMWRITE_PNG_COMPRESSION, 0))
    return np.asarray(transform(record, record_rng(0, 0, 0)), np.uint8)


@pytest.mark.parametrize("file", PHOTOGRAPHS, ids=lambda file: file.name)
@pytest.mark.parametrize("interpolation", ["auto", "linear"])
def test_photographs_are_evaluated_as_a_whole(file: object, interpolation: str) -> None:
    image = decode_rgb(file.read_bytes())  # type: ignore[attr-defined]

    for size, resize in [(224, 256), (64, 72)]:
        expected = whole(image, size, resize, interpolation)
        np.testing.assert_array_equal(evaluated(image, size, resize, interpolation), expected)


interpolations = st.sampled_from(["auto", "linear", "area", "cubic"])
resizes = st.integers(1, 90)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 120), st.floats(1, EXTREME_ASPECT), st.booleans(), resizes, interpolations, st.data())
def test_usual_images_are_evaluated_as_a_whole(
    shorter: int, aspect: float, is_high: bool, resize: int, interpolation: str, data: st.DataObject
) -> None:
    longer, size = int(shorter * aspect), data.draw(st.integers(1, resize))
    image = pixels(longer, shorter, 3) if is_high else pixels(shorter, longer, 3)

    expected = whole(image, size, resize, interpolation)
    np.testing.assert_array_equal(evaluated(image, size, resize, interpolation), expected)


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", METHODS)
@pytest.mark.parametrize(("shorter", "resize"), [(1, 64), (2, 64), (5, 60), (8, 96), (64, 64)])
@pytest.mark.parametrize("aspect", [200, 201, 300])
def test_images_of_extreme_aspect_are_as_if_they_were_resized_whole(
    shorter: int, resize: int, aspect: int, interpolation: str
) -> None:
    image = pixels(shorter, shorter * aspect, 3)

    for kept in (image, image.transpose(1, 0, 2)):
        expected = whole(np.ascontiguousarray(kept), 56, resize, interpolation)
        np.testing.assert_array_equal(evaluated(kept, 56, resize, interpolation), expected)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.floats(20, 500),
    st.integers(40, 200),
    st.sampled_from(["auto", "cubic"]),
    st.data(),
)
def test_images_of_any_extreme_aspect_differ_by_rounding_only(
    shorter: int, aspect: float, resize: int, interpolation: str, data: st.DataObject
) -> None:
    longer, size = int(shorter * aspect), data.draw(st.integers(1, resize))
    places = np.add.outer(np.arange(shorter) * 3, np.arange(longer) * 4)
    ramp = np.abs(places % 510 - 255)  # without edges: the grids may be a quarter of a pixel apart
    image = np.dstack([ramp, 255 - ramp, ramp // 2]).astype(np.uint8)

    different = np.abs(
        evaluated(image, size, resize, interpolation).astype(int) - whole(image, size, resize, interpolation)
    )
    assert different.max() <= 2


@pytest.mark.parametrize("shape", [(1, 65_500), (65_500, 1), (3, 60_000)])
def test_a_line_of_pixels_does_not_take_all_memory(shape: tuple[int, int]) -> None:
    image = encoded(pixels(*shape, 3))

    for transform in (EvalTransform(224, resize=1024), TrainTransform(224)):  # 200 GB if resized as a whole
        made = transform(Record("key", 0, image), record_rng(0, 0, 0))
        assert made.shape == (224, 224, 3)


@given(st.integers(1, 70_000), st.integers(1, 70_000), st.integers(1, 400), st.booleans(), st.data())
def test_a_window_holds_what_is_kept_and_is_bounded(
    one: int, other: int, resize: int, is_whole: bool, data: st.DataObject
) -> None:
    shorter, side = sorted((one, other))
    resized, size = resize * side // shorter, data.draw(st.integers(1, resize))
    first = round((resized - size) / 2)

    most = EXTREME_ASPECT * resize
    start, stop, at = window_of(side, resized, first=first, size=size, most=most, is_whole=is_whole)

    factor, most = resized / side, max(most, 8192)
    assert 0 <= start < stop <= side
    assert (stop - start) * factor <= most + 4 * factor + 1
    assert resized > most or start * resized == at * side
    assert not is_whole or resized > most or (start, stop, at) == (0, side, 0)
    assert start * factor <= max(0, first - 2 * factor) + 1  # two pixels for cubic interpolation
    assert stop == side or stop * factor >= first + size + 2 * factor
    assert abs(at - start * factor) <= 0.5 * factor + 1e-6


@pytest.mark.parametrize(
    "options", [{"size": MAX_SIDE + 1}, {"size": 9, "resize": MAX_SIDE + 1}, {"size": 10**9, "resize": 10**9}]
)
def test_sizes_that_no_memory_holds_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="4096"):
        EvalTransform(**options)


@pytest.mark.parametrize("ratio", [(0.5, float("inf")), (1e-300, 1e300), (0.0, 1.0), (float("nan"), 1.0)])
def test_aspects_that_no_image_has_are_refused(ratio: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="ratio"):
        TrainTransform(64, ratio=ratio)
