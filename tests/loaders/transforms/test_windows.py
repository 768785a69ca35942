"""Of a resized image that is far longer than high, only the kept part is made, from the same grid."""

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.records.record import Record
from shardprep.loaders import EvalTransform
from shardprep.loaders.order.rng import record_rng
from support.image_files import encoded

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
