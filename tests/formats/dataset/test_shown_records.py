"""Records to look at: pictures in a notebook, a list in a terminal."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats import UsageError, open_dataset
from shardprep.formats.images.pictures import Gallery, ShownImage


def pictures(page: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r"base64,([\w+/=]+)", page)]


def test_some_records_are_shown_with_their_numbers_keys_and_classes(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        shown = dataset.show(4)
        page, text = shown._repr_html_(), repr(shown)

        chosen = [dataset[place * len(dataset) // 4] for place in range(4)]
        assert len(pictures(page)) == len(shown) == 4
        for record, line in zip(chosen, text.splitlines()[1:], strict=True):
            assert record.key in page
            assert f"{record.key}, {dataset.classes[record.label]}" in line
            assert f"{len(record.image):,} bytes" in line
        assert str(dataset.path) in text.splitlines()[0]
        assert pictures(dataset.show([-1])._repr_html_()) == [dataset[-1].image]


@pytest.mark.parametrize("records", [0, -1, 101, list(range(101))])
def test_too_many_records_are_refused(lmdb_shards: Path, records: int | list[int]) -> None:
    with open_dataset(lmdb_shards) as dataset, pytest.raises(UsageError, match="1 to 100"):
        dataset.show(records)


def test_hostile_captions_stay_bounded_text_and_large_images_are_made_small() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8)
    large = bytes(cv2.imencode(".png", noise)[1])
    key = "<script>alert(1)</script>\x1b[2J\n\u202e" + "x" * 5000
    shown = Gallery(key, [ShownImage(large, key), ShownImage(b"", key), ShownImage(b"no image", key)])
    page, text = shown._repr_html_(), repr(shown)

    assert "<script" not in page
    assert len(page) < 200_000
    assert len(text.splitlines()) == 4
    assert all(line.isprintable() and len(line) < 1100 for line in text.splitlines())
    assert page.count("does not decode") == 1
    assert len(pictures(page)) == 1
