"""A fraction of train as val: disjoint, complete, stratified, and the same every time."""

from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import PlanMismatch, SourceOptions, UsageError, convert
from shardprep.formats.sources.converted import drawn
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import entry_dtype
from support.image_files import encoded, pixels
from support.source_builders import contents, write


def entries_of(sizes: list[int]) -> np.ndarray:
    rows = [(f"{c}/{i}".encode(), b"", c, 1, 0, 0) for c, size in enumerate(sizes) for i in range(size)]
    return np.array(rows, entry_dtype(8, 1))


def test_the_drawing_of_a_seed_never_changes() -> None:
    entries = entries_of([6, 6])

    assert entries["key"][drawn(entries, 0.25, 0)].tolist() == [b"0/3", b"1/4"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        for number in range(10):
            write(tmp_path / "photos" / name / f"{number}.png", encoded(pixels(8, 8 + number), ".png"))
    return tmp_path / "photos"


def test_train_and_val_are_disjoint_and_complete(photos: Path) -> None:
    whole = contents(recognise(photos).listing("train"))
    source = recognise(photos, options=SourceOptions(val_fraction=0.2), seed=3)

    train, val = (contents(source.listing(split)) for split in source.splits)

    assert source.splits == ("train", "val")
    assert len(val) == 4
    assert train | val == whole
    assert train.keys().isdisjoint(val)


def test_another_fraction_than_a_finished_outputs_is_named_with_the_old_one(
    photos: Path, tmp_path: Path
) -> None:
    convert(photos, tmp_path / "out", source_options=SourceOptions(val_fraction=0.2), workers=0)

    with pytest.raises(PlanMismatch, match=r"dataset: --val-fraction was 0\.2, is now 0\.4; choose"):
        convert(photos, tmp_path / "out", source_options=SourceOptions(val_fraction=0.4), workers=0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_that_is_none_is_wrong_usage(fraction: float) -> None:
    with pytest.raises(UsageError, match="above 0 and below 1"):
        SourceOptions(val_fraction=fraction)
