"""The images of a step, to look at: what a training gets, without a change of the loader."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, TrainTransform
from support.column_datasets import write_columns
from support.loaded import loader_on


def pictures(page: str) -> list[np.ndarray]:
    found = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([\w+/=]+)", page)]
    return [cv2.imdecode(np.frombuffer(one, np.uint8), cv2.IMREAD_COLOR)[..., ::-1] for one in found]


def test_a_notebook_shows_the_pixels_that_a_training_gets(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=TrainTransform(24), batch_size=10, workers=0) as loader:
        steps = iter(loader)
        next(steps)
        state = loader.state_dict()
        shown = loader.show_batch(epoch=0, step=1, most=4)
        assert loader.state_dict() == state
        images = next(steps)[0]
        made = loader.replay(0, 1)
        steps.close()  # type: ignore[attr-defined]

    for found, expected in zip(pictures(shown._repr_html_()), images[:4], strict=True):
        np.testing.assert_array_equal(found, expected)
    lines = repr(shown).splitlines()
    assert "4 of 10 images of step 1 of epoch 0" in lines[0]
    assert all(key in line for key, line in zip(made.keys[:4], lines[1:], strict=True))
    assert all("24x24 PNG" in line for line in lines[1:])


def test_the_next_epoch_is_shown_where_none_is_named(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=TrainTransform(8), workers=0) as loader:
        loader.set_epoch(3)
        assert repr(loader.show_batch()) == repr(loader.show_batch(3, 0))
        assert len(loader.show_batch(most=1000)) <= 100
        with pytest.raises(IndexError):
            loader.show_batch(0, 10**6)


def test_a_batch_without_images_has_nothing_to_show(tmp_path: Path) -> None:
    write_columns(tmp_path / "d", image=None)
    with (
        Loader(tmp_path / "d", batch_size=2, workers=0) as loader,
        pytest.raises(UsageError, match="no images"),
    ):
        loader.show_batch()
