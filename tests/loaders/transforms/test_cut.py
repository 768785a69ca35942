"""Cuts: decoding them gives the transform's own pixels, and they are JPEGs that any decoder reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import BadImage, UsageError
from shardprep.formats.images.kinds import jpeg_size, marker_segments
from shardprep.loaders import ColorJitter, Cut, EvalTransform, TrainTransform
from shardprep.loaders.loader.run_card import TransformCard
from shardprep.loaders.order.rng import record_rng
from support.loaded import crops_on, epoch_of
from support.transform_examples import examples

crops = st.builds(
    TrainTransform,
    st.sampled_from([8, 24, (40, 32), 96]),
    layout=st.sampled_from(["HWC", "CHW"]),
    dtype=st.sampled_from(["uint8", "float32"]),
    interpolation=st.sampled_from(["auto", "auto", "linear", "area"]),
    scale=st.sampled_from([(0.02, 0.1), (0.05, 0.32), (0.3, 1.0)]),
)


@given(
    transform=crops,
    kind=st.sampled_from(["crop-ready", "crop-ready", "plain", "png", "cmyk"]),
    record=st.integers(0, 99),
)
@settings(max_examples=80)
def test_a_cut_is_finished_to_the_pixels_of_the_transform(
    transform: TrainTransform, kind: str, record: int
) -> None:
    made = Cut(transform)(examples()[kind], record_rng(1, 2, record))

    found = Cut(transform).finish(**made)

    np.testing.assert_array_equal(found, transform(examples()[kind], record_rng(1, 2, record)))


@given(transform=crops, record=st.integers(0, 99))
@settings(max_examples=40)
def test_a_cut_of_a_crop_ready_image_is_a_small_baseline_jpeg_around_the_crop(
    transform: TrainTransform, record: int
) -> None:
    whole = examples()["crop-ready"]
    made = Cut(transform)(whole, record_rng(1, 2, record))
    jpeg, (x, y, width, height) = made["jpeg"], made["crop"].tolist()
    sides = jpeg_size(jpeg)
    shown = transform.shown(whole, record_rng(1, 2, record))

    assert sides
    assert 0 <= x < x + width <= sides[0]
    assert 0 <= y < y + height <= sides[1]
    assert len(jpeg) <= len(whole.image)
    assert jpeg.startswith(b"\xff\xd8")
    assert jpeg.endswith(b"\xff\xd9")
    assert {marker for marker, *_ in marker_segments(jpeg)} & {0xC0, 0xC1}
    pixels = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    expected = cv2.imdecode(np.frombuffer(whole.image, np.uint8), cv2.IMREAD_COLOR)
    assert pixels.shape == (sides[1], sides[0], 3)
    left, top = round(shown.x) // 8 * 8 + x % 8, round(shown.y) // 8 * 8 + y % 8
    np.testing.assert_array_equal(
        pixels[y : y + height, x : x + width], expected[top : top + height, left : left + width]
    )


@pytest.mark.parametrize(
    "given",
    [
        EvalTransform(8),
        TrainTransform,
        "cut",
        TrainTransform(8, color_jitter=ColorJitter()),
        TrainTransform(8, lighting=0.1),
        TrainTransform(8, masks=("mask",)),
        TrainTransform(8, boxes="boxes"),
        TrainTransform(8, orientation="apply"),
    ],
)
def test_what_would_have_to_happen_after_decoding_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="Cut takes a TrainTransform"):
        Cut(given)


def test_a_damaged_jpeg_is_named_by_its_key() -> None:
    made = Cut(TrainTransform(8))(examples()["plain"], record_rng(1, 2, 3))

    with pytest.raises(BadImage) as raised:
        Cut(TrainTransform(8)).finish(made["jpeg"][:100], made["crop"], made["mirrored"], key="one")

    assert raised.value.key == "one"


def test_a_loader_delivers_cuts_that_are_finished_to_its_crops(lmdb_shards: Path) -> None:
    cut = Cut(TrainTransform(24))
    for workers in (0, 2):
        with crops_on(lmdb_shards, transform=cut, workers=workers) as loader:
            found = epoch_of(loader, 3)
            shown = loader.replay(0, 1)
        with crops_on(lmdb_shards, transform=cut.transform, workers=0) as plain:
            expected = epoch_of(plain, 3)
        for (values, labels, numbers), (pixels, *others) in zip(found, expected, strict=True):
            assert (values["crop"].dtype, values["mirrored"].dtype) == (np.int32, np.bool_)
            made = [cut.finish(*row) for row in zip(*values.values(), strict=True)]
            np.testing.assert_array_equal(np.stack(made), pixels)
            np.testing.assert_array_equal([labels, numbers], others)
        assert all(record.shown for record in shown)


def test_a_run_card_makes_the_cut_again() -> None:
    cut = Cut(TrainTransform(24, scale=(0.1, 0.9)))

    assert TransformCard.from_json(TransformCard.of(cut, "identity").to_json()).made() == cut
