"""Transforms: the crops they draw, the pixels they write, what decodes them, and long images."""

import importlib
import math
import subprocess
import sys
from dataclasses import fields, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from hypothesis import given, settings, strategies as st
from PIL import Image as Pillow

from shardprep.formats.errors import BadImage, UsageError
from shardprep.formats.images import decode as fast
from shardprep.formats.images.crop_ready import Crop
from shardprep.formats.records.record import Record
from shardprep.loaders.order.rng import RecordRandom
from shardprep.loaders.transforms import decode as decoding
from shardprep.loaders.transforms.contract import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ArraySpec,
    PixelFormat,
    fill_rows,
)
from shardprep.loaders.transforms.decode import decode_rgb
from shardprep.loaders.transforms.geometry import ShownPart
from shardprep.loaders.transforms.transforms import (
    CROP_DRAWS,
    ColorJitter,
    EvalTransform,
    ImageTransform,
    TrainTransform,
    random_crop,
)
from support.image_files import PHOTOGRAPHS, encoded
from support.mutations import mutated
from support.transform_examples import COFFEE, rng

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
JITTERED = TrainTransform(64, color_jitter=ColorJitter(), lighting=0.1)

draws = st.lists(st.floats(0, 1, exclude_max=True), min_size=CROP_DRAWS, max_size=CROP_DRAWS)
sides = st.integers(1, 3000)


@given(width=sides, height=sides, draws=draws)
def test_a_crop_lies_in_the_image_and_is_never_empty(width, height, draws):
    x, y, w, h = random_crop(width, height, scale=SCALE, ratio=RATIO, draws=draws)

    assert 0 <= x < x + w <= width
    assert 0 <= y < y + h <= height


@pytest.mark.parametrize("transform", [TrainTransform(64), JITTERED, EvalTransform(64, resize=73)])
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


def test_a_train_image_is_the_crop_resized_and_flipped():
    uniform = rng(4).random(1 + CROP_DRAWS).tolist()
    pixels = decode_rgb(COFFEE.image)
    height, width = pixels.shape[:2]
    x, y, w, h = random_crop(width, height, scale=SCALE, ratio=RATIO, draws=uniform[1:])
    expected = cv2.resize(pixels[y : y + h, x : x + w], (224, 224))
    if uniform[0] < 0.5:
        expected = expected[:, ::-1]

    np.testing.assert_array_equal(TrainTransform()(COFFEE, rng(4)), expected)


plain = st.none() | st.booleans() | st.integers(-3, 5000) | st.floats(-10, 10) | st.text(max_size=9)
odd = [math.nan, 10**400, b"no", object, {}, ColorJitter(), ["uint8"]]
odd += [np.float32(0.5), np.array([0.5, 1]), np.int64(9)]
anything = plain | st.lists(plain, max_size=3).map(tuple) | st.lists(plain) | st.sampled_from(odd)


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
    if isinstance(made, ImageTransform) and len(made.outputs) == 1 and made.outputs[0].nbytes < 1e6:
        fill_rows(made, COFFEE, rng(), tuple(np.empty(spec.shape, spec.dtype) for spec in made.outputs))


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
        out = np.empty(form.shape(5, 7), form.numpy_dtype)
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
    return np.where((to_low < to_high) | ((to_low == to_high) & (below % 2 == 0)), low, high)


@pytest.mark.parametrize(
    ("transform", "shown"),
    [
        (TrainTransform(), "TrainTransform(224)"),
        (TrainTransform((64, 32), dtype="float32"), "TrainTransform((64, 32), dtype='float32')"),
        (EvalTransform(64, resize=72), "EvalTransform(64, resize=72)"),
    ],
)
def test_a_transform_shows_the_call_making_it(transform: TrainTransform | EvalTransform, shown: str) -> None:
    assert repr(transform) == shown
    assert eval(shown) == transform  # noqa: S307 - a text of this test


def test_an_opencv_that_decodes_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(cv2, "__version__", "4.12.0")

    with pytest.raises(ImportError, match=r"install opencv-python-headless 4\.13"):
        importlib.reload(fast)


@pytest.mark.slow
def test_no_room_for_the_pixels_says_nothing_of_the_image() -> None:
    script = """
import resource
import numpy as np
from shardprep.formats.images.decode import check_decodes, cv2

image = cv2.imencode(".jpg", np.zeros((6000, 6000, 3), np.uint8))[1].tobytes()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
try:
    check_decodes(image)
except MemoryError as error:
    print(error)
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (done.stdout, done.stderr) == ("not enough memory for an image's pixels\n", "")


METHODS = {"linear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC}
Image = npt.NDArray[np.uint8]


def whole(image: Image, size: int, resize: int, interpolation: str) -> Image:
    """The definition of the transform: resize the whole image, then cut out the centre."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    w, h = resize * width // shorter, resize * height // shorter
    shrinking = shorter / resize
    if interpolation == "auto":
        interpolation = "area" if shrinking > 1 else "linear"
        if 1.2 <= shrinking <= 3:
            interpolation, beside = "linear", min(0.36, 1.1 * (shrinking**2 - 1) / 12)
            kernel = np.array([beside, 1 - 2 * beside, beside])
            image = np.asarray(cv2.sepFilter2D(image, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE))
    resized = cv2.resize(image, (w, h), interpolation=METHODS[interpolation])
    x, y = round((w - size) / 2), round((h - size) / 2)
    return np.asarray(resized[y : y + size, x : x + size], np.uint8)


def evaluated(image: Image, size: int, resize: int, interpolation: str) -> Image:
    transform = EvalTransform(size, resize=resize, interpolation=interpolation)  # type: ignore[arg-type]
    record = Record("key", 0, encoded(image[..., ::-1], ".png", cv2.IMWRITE_PNG_COMPRESSION, 0))
    return np.asarray(transform(record, RecordRandom(0)(0, 0)), np.uint8)


def coarse(width: int, height: int) -> Image:
    """An image without edges, so that a fraction of a pixel shows where it lies."""
    noise = np.random.default_rng(0).normal(size=(height, width, 3)).astype(np.float32)
    blurred = cv2.GaussianBlur(noise, (0, 0), 8)
    return np.asarray(np.clip(128 + 45 * blurred / blurred.std(), 0, 255), np.uint8)


@pytest.mark.parametrize("interpolation", ["auto", "area", "linear", "cubic"])
@pytest.mark.parametrize(
    "shape", [(100, 100), (80, 80), (80, 121), (270, 80), (192, 192), (200, 310), (60, 97)]
)
def test_the_eval_image_is_the_centre_of_the_resized_one(shape: tuple[int, int], interpolation: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    is_smoothed = interpolation == "auto" and 1.2 <= min(shape) / 64 <= 3
    # a smoothed image begins between two pixels: it differs little only where there are no edges
    pixels, apart = (coarse(*shape[::-1]), 1) if is_smoothed else (noise, 0)

    made, defined = (make(pixels, 56, 64, interpolation).astype(int) for make in (evaluated, whole))

    assert np.abs(made - defined).max() <= apart


def antialiased(record: Record, shown: ShownPart, height: int, width: int) -> npt.NDArray[np.float64]:
    """The part of an image by Pillow's antialiased bilinear resizing."""
    box = (shown.x, shown.y, shown.x + shown.width, shown.y + shown.height)
    whole = Pillow.fromarray(decode_rgb(record))
    return np.asarray(whole.resize((width, height), Pillow.Resampling.BILINEAR, box=box), float)


@pytest.mark.parametrize("resize", [45, 128, 160, 200])
def test_auto_is_nearer_to_antialiased_resizing_than_averages_are(resize: int) -> None:
    size, found = resize * 7 // 8, []
    ways = [EvalTransform(size, resize=resize, interpolation=name) for name in ("auto", "area")]
    for photograph in PHOTOGRAPHS:
        record = Record("key", 0, photograph.read_bytes())  # of twice the size, it is decoded at a fraction
        if min(decode_rgb(record).shape[:2]) >= 1.4 * resize:
            reference = antialiased(record, ways[0].shown(record, rng(0)), size, size)
            found.append([np.sqrt(np.mean((way(record, rng(0)) - reference) ** 2)) for way in ways])

    auto, area = 20 * np.log10(255 / np.median(found, axis=0))
    assert len(found) > 5
    assert auto > max(38, area)


def moved(image: Image, record: Record, shown: ShownPart) -> float:
    """How many of its pixels an image lies beside Pillow's antialiased resizing of the part that it shows."""
    smooth = antialiased(record, shown, *image.shape[:2])
    down, across = (change[2:-2, 2:-2].ravel() for change in np.gradient(smooth, axis=(0, 1)))
    apart = (image[:, :: -1 if shown.is_mirrored else 1] - smooth)[2:-2, 2:-2].ravel()
    return float(np.abs(np.linalg.lstsq(np.stack([across, down], axis=1), apart)[0]).max())


@pytest.mark.parametrize("suffix", [".jpg", ".png"])  # decoded at a fraction of the size, and whole
@pytest.mark.parametrize(
    ("size", "crop"),
    [
        ((48, 144), (10, 33, 280, 667)),
        ((97, 61), (35, 514, 618, 187)),
        ((64, 64), (238, 124, 250, 577)),
        ((96, 96), (438, 421, 215, 280)),
        ((64, 96), (0, 0, 653, 701)),
    ],
)
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_a_train_image_lies_where_antialiased_resizing_of_its_crop_has_it(
    suffix: str, size: tuple[int, int], crop: tuple[int, int, int, int], is_mirrored: bool
) -> None:
    record = Record("key", 0, encoded(coarse(653, 701), suffix))
    transform = TrainTransform(size)
    choice = transform.choice_of(transform.open_image(record), Crop(*crop), is_mirrored)
    made = np.empty((*size, 3), np.uint8)

    transform.draw(transform.open_image(record), choice, rng(0), made)

    assert moved(made, record, choice.shown) < 0.03


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
@pytest.mark.parametrize(
    ("width", "height"), [(453, 255), (382, 255), (340, 191), (192, 340), (250, 188), (681, 383), (906, 510)]
)
def test_an_eval_image_lies_where_antialiased_resizing_of_the_centre_has_it(
    suffix: str, width: int, height: int
) -> None:
    record = Record("key", 0, encoded(coarse(width, height), suffix))
    transform = EvalTransform(112, resize=128)

    assert moved(transform(record, rng(0)), record, transform.shown(record, rng(0))) < 0.06


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.floats(20, 500),
    st.integers(40, 200),
    st.sampled_from(["auto", "area", "cubic"]),
    st.data(),
)
def test_images_of_any_extreme_aspect_differ_by_rounding_or_a_step_of_area(
    shorter: int, aspect: float, resize: int, interpolation: str, data: st.DataObject
) -> None:
    longer, size = int(shorter * aspect), data.draw(st.integers(1, resize))
    places = np.add.outer(np.arange(shorter) * 3, np.arange(longer) * 4)
    ramp = np.abs(places % 510 - 255)  # in steps of 4; the grids may be a quarter of a pixel apart
    image = np.dstack([ramp, 255 - ramp, ramp // 2]).astype(np.uint8)

    different = np.abs(
        evaluated(image, size, resize, interpolation).astype(int) - whole(image, size, resize, interpolation)
    )
    resized = resize * longer // shorter
    starts = (round((resized - size) / 2) + np.arange(size)) * longer % resized  # 0 where a pixel begins, too
    assert (different.max(axis=(0, 2)) <= 2 + 4 * ((starts == 0) & (interpolation == "area"))).all()


def both(image: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What becomes of an image with the faster decoder and without: its pixels, or None for a bad one."""
    found: list[Any] = []
    for decoder in (fast.jpeg_decoder(), None):
        monkeypatch.setattr(decoding, "jpeg_decoder", lambda decoder=decoder: decoder)
        try:
            found.append(decode_rgb(image))
        except BadImage:
            found.append(None)
    return found


@given(
    sides=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    channels=st.sampled_from([1, 3]),
    quality=st.integers(1, 100),
    sampling=st.sampled_from([0x411111, 0x111111, 0x211111, 0x121111, 0x221111]),
    restart=st.integers(0, 9),
    progressive=st.booleans(),
    seed=st.integers(0, 9),
)
def test_its_pixels_are_those_of_opencv(
    sides: tuple[int, int],
    channels: int,
    quality: int,
    sampling: int,
    restart: int,
    progressive: bool,
    seed: int,
) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (*sides, channels), np.uint8)
    image = encoded(
        cv2.GaussianBlur(noise, (0, 0), 1 + seed),
        ".jpg",
        *(cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling),
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, restart, cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive)),
    )

    with pytest.MonkeyPatch.context() as patched:
        quick, slow = both(image, patched)

    assert fast.jpeg_decoder() is not None
    assert np.array_equal(quick, slow)
    assert np.array_equal(quick, simplejpeg.decode_jpeg(image, fastdct=False, fastupsample=False))


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_image_is_what_opencv_makes_of_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    for _ in range(10):
        image = mutated(PHOTOGRAPHS[rng.randrange(len(PHOTOGRAPHS))].read_bytes(), rng)
        quick, slow = both(image, monkeypatch)
        assert np.array_equal(quick, slow), (seed, len(image))


def refused(image: bytes, **options: Any) -> Any:
    raise ValueError("no")


@pytest.mark.parametrize(
    "decode",
    [None, lambda *image, **options: simplejpeg.decode_jpeg(*image, **options) ^ np.uint8(1), refused],
    ids=["missing", "other pixels", "refused"],
)
def test_it_is_not_used_where_it_is_missing_or_makes_other_pixels(
    decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", decode and SimpleNamespace(decode_jpeg=decode))

    assert fast.jpeg_decoder.__wrapped__() is None


def test_a_record_without_an_image_is_an_error_that_names_both_remedies() -> None:
    with pytest.raises(
        UsageError, match=r"^7: the record has no image .* in columns=, too, .* has no images"
    ):
        TrainTransform(8)(Record("7", 0, b""), rng(0))
