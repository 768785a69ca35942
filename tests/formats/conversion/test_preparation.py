"""What is refused before anything is written: outputs of another shape, and problems of any split."""

from pathlib import Path

import pytest

from shardprep.formats import (
    UsageError,
    convert,
    plan_conversion,
)
from shardprep.formats.runtime.progress import NoProgress
from support.image_files import encoded, pixels
from support.source_builders import write


class Notes(NoProgress):
    """Progress that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Train and val of two classes."""
    for split in ("train", "val"):
        for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
            write(tmp_path / "photos" / split / name, encoded(pixels(8, 8), ".png"))
    return tmp_path / "photos"


@pytest.mark.parametrize("state", ["manifest.json", ".prep"])
def test_one_split_is_not_written_into_a_folder_of_splits(state: str, photos: Path, tmp_path: Path) -> None:
    write(tmp_path / "out" / "train" / state, b"{}")

    with pytest.raises(
        UsageError, match=r"is a folder of splits \(train\); give '.*out/val' with --split val"
    ):
        convert(photos, tmp_path / "out", split="val", workers=0)

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


def test_a_class_of_val_without_an_image_in_train_is_named(photos: Path, tmp_path: Path) -> None:
    write(photos / "val" / "dogs/1.png", encoded(pixels(8, 8), ".png"))
    for run in (plan_conversion, convert):
        progress = Notes()

        run(photos, tmp_path / "out", workers=0, progress=progress)

        assert "classes of val without an image in train: dogs" in progress.notes


@pytest.mark.parametrize("split", [None, "val"])
def test_a_file_is_no_output(split: str | None, photos: Path, tmp_path: Path) -> None:
    write(tmp_path / "out", b"")

    with pytest.raises(UsageError, match="out: is not a folder; choose another output"):
        convert(photos, tmp_path / "out", split=split, workers=0)
