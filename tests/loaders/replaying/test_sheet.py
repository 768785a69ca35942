"""The contact sheet of a step shows the pixels that were delivered."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import ContactSheet, EvalTransform, Replayed, ReplayedRecord, TrainTransform
from shardprep.loaders.loader.replay import pictures_of
from shardprep.loaders.loader.sheet import GAP, TITLE
from support.loaded import loader_on
from support.loader_workers import Tagging


def read_png(data: bytes) -> np.ndarray[Any, Any]:
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_pictures_are_the_pixels_before_they_were_normalised(
    dtype: Any, layout: Any, lmdb_shards: Path
) -> None:
    form = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.1)}
    plain, normalised = TrainTransform((20, 16)), TrainTransform((20, 16), dtype=dtype, layout=layout, **form)
    with (
        loader_on(lmdb_shards, transform=plain) as one,
        loader_on(lmdb_shards, transform=normalised) as other,
    ):
        expected = one.replay(0, 1).batch[0]
        found = pictures_of(other.replay(0, 1).batch, normalised)

    worst = {"bfloat16": 2, "float16": 1}.get(dtype, 0)
    assert np.abs(np.stack(found).astype(int) - expected).max() <= worst


def test_numbers_of_other_transforms_are_stretched() -> None:
    values = np.linspace(-3, 5, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    first, second = pictures_of((values,), None)

    assert (first.shape, first.min(), second.max()) == ((4, 4, 3), 0, 255)
    assert pictures_of((np.full((1, 2, 2), 0.5),), None)[0].tolist() == [[[128] * 3] * 2] * 2


@pytest.mark.parametrize("batch", [({"caption": ["a"]},), (np.zeros((2, 3)),), ([{"a": 1}],)], ids=str)
def test_a_batch_without_images_has_no_sheet(batch: Any) -> None:
    with pytest.raises(UsageError, match="image"):
        pictures_of(batch, None)


def step(names: list[str], pixels: Any, reasons: dict[str, str]) -> Replayed:
    records = (ReplayedRecord(at, name, at, skipped=reasons.get(name)) for at, name in enumerate(names))
    return Replayed(0, 7, (pixels, np.arange(len(pixels))), tuple(records))


def test_a_sheet_has_each_picture_in_its_cell(tmp_path: Path) -> None:
    names = ["a" * 300, "\u202eé\x1b[2J<b>", "bad", *map(str, range(6))]
    pixels = np.random.default_rng(0).integers(0, 255, (8, 160, 160, 3), np.uint8)
    sheet = ContactSheet(step(names, pixels, {"bad": "<i>broken"}))
    sheet.save(tmp_path / "sheet.PNG")
    drawn = read_png((tmp_path / "sheet.PNG").read_bytes())

    assert np.array_equal(drawn, sheet.drawn())
    assert drawn.shape[1] == GAP + 4 * (160 + GAP)
    height = (len(drawn) - TITLE - GAP) // 3
    for place, row in enumerate([0, 1, None, *range(2, 8)]):
        x, y = GAP + place % 4 * (160 + GAP), TITLE + GAP + place // 4 * height
        shown = drawn[y : y + 160, x : x + 160]
        assert np.array_equal(shown, pixels[row]) == (row is not None)


def test_a_page_has_the_pixels_as_they_are_and_no_foreign_markup(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="pages need Jinja2")
    pixels = np.random.default_rng(0).integers(0, 255, (2, 9, 8, 3), np.uint8)
    made = step(["\u202e<script>x</script>", "bad", "c"], pixels, {"bad": "<i>broken"})
    ContactSheet(made).save(tmp_path / "sheet.html")
    text = (tmp_path / "sheet.html").read_text()

    found = [read_png(base64.b64decode(data)) for data in re.findall(r"png;base64,([^\"]+)", text)]
    assert [picture.tolist() for picture in found] == pixels.tolist()
    assert "<script" not in text
    assert "<i>" not in text
    assert "\u202e" not in text
    assert "default-src" in text
    assert made.digest() in text


def test_a_sheet_of_another_kind_or_of_too_many_is_refused(tmp_path: Path, lmdb_shards: Path) -> None:
    one = step(["a"], np.zeros((1, 4, 4, 3), np.uint8), {})
    many = step(list(map(str, range(1025))), np.zeros((1025, 1, 1, 3), np.uint8), {})
    with pytest.raises(UsageError, match=r"\.png or \.html"):
        ContactSheet(one).save(tmp_path / "sheet.gif")
    with pytest.raises(UsageError, match="at most 1024"):
        ContactSheet(many).png()
    with loader_on(lmdb_shards, transform=Tagging()) as loader, pytest.raises(UsageError, match="RGB"):
        ContactSheet(loader.replay(0, 0)).drawn()
    with loader_on(lmdb_shards, transform=EvalTransform(8, resize=9), batch_size=200) as loader:
        assert ContactSheet(loader.replay(0, 0), loader.transform).drawn().shape[1] <= 2400 + GAP
