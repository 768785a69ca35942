"""A record on the screen: a short text, and in a notebook the picture."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats import Record, open_dataset


def photograph(kind: str, height: int = 40, width: int = 60) -> bytes:
    """A file of noise, which no format makes much smaller."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return bytes(cv2.imencode(kind, pixels)[1])


def shown(page: str) -> tuple[str, bytes]:
    """The media type and the bytes of the picture in a page."""
    ((kind, data),) = re.findall(r'src="data:([\w/]+);base64,([\w+/=]+)"', page)
    return kind, base64.b64decode(data)


def test_a_record_is_one_line_without_its_bytes() -> None:
    record = Record("n01440764/n01440764_1", 3, b"\xff\xd8" * 50_000)

    assert repr(record) == str(record) == "<Record 'n01440764/n01440764_1': label 3, 100,000 bytes>"
    assert repr([record]) == f"[{record!r}]"
    assert record == ("n01440764/n01440764_1", 3, record.image)


def test_a_hostile_key_is_one_line_of_printable_text() -> None:
    text = repr(Record("a\x1b[2J\n<b>", 0, b""))

    assert text.isprintable()
    assert "<b>" not in Record("a<b>", 0, photograph(".png"))._repr_html_()


@pytest.mark.parametrize(
    ("kind", "media"), [(".jpg", "image/jpeg"), (".png", "image/png"), (".webp", "image/webp")]
)
def test_a_notebook_shows_the_files_own_bytes(kind: str, media: str) -> None:
    record = Record("k", 0, photograph(kind))

    assert shown(record._repr_html_()) == (media, record.image)
    assert "label 0" in record._repr_html_()


@pytest.mark.parametrize(
    ("kind", "size"), [(".bmp", (40, 60)), (".png", (800, 1200)), (".jpg", (2000, 1500))]
)
def test_other_kinds_and_large_files_are_shown_as_a_small_jpeg(kind: str, size: tuple[int, int]) -> None:
    media, data = shown(Record("k", 0, photograph(kind, *size))._repr_html_())

    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert media == "image/jpeg"
    assert pixels is not None
    assert pixels.shape[0] / pixels.shape[1] == pytest.approx(size[0] / size[1], abs=0.01)
    assert max(pixels.shape) <= 768
    assert len(data) < 1 << 20


@pytest.mark.parametrize("image", [b"", b"no picture", b"GIF89a"])
def test_what_does_not_decode_is_said_so(image: bytes) -> None:
    page = Record("k", 0, image)._repr_html_()

    assert "does not decode" in page
    assert "src=" not in page


def test_a_record_of_a_dataset_is_shown(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        assert shown(dataset[0]._repr_html_())[1] == dataset[0].image
