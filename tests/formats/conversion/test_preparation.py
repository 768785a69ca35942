"""What is refused before anything is written: outputs of another shape, and problems of any split."""

from pathlib import Path

import pytest

from shardprep.formats import (
    ConvertOptions,
    SourceDamaged,
    SourceIncomplete,
    UsageError,
    convert,
    plan_conversion,
    verify,
)
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.sources.source import Problems
from support.datasets import tree
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


def test_splits_are_not_written_into_a_dataset(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "out", split="val", workers=0)
    before = tree(tmp_path / "out")

    with pytest.raises(UsageError, match="holds one dataset"):
        convert(photos, tmp_path / "out", workers=0)

    assert tree(tmp_path / "out") == before
    assert verify(tmp_path / "out").findings == []


def test_splits_are_not_written_into_an_unfinished_dataset(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".prep").mkdir(parents=True)

    with pytest.raises(UsageError, match="holds one dataset"):
        convert(photos, tmp_path / "out", workers=0)

    (done,) = convert(photos, tmp_path / "out", split="val", workers=0)
    assert done.manifest.split == "val"


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


def test_a_folder_of_splits_that_was_begun_is_finished(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "out" / "train", split="train", workers=0)
    (tmp_path / "out" / "val" / ".prep").mkdir(parents=True)

    done = convert(photos, tmp_path / "out", workers=0)

    assert [one.already_complete for one in done] == [True, False]


def test_labels_of_every_split_are_found_before_the_first_shard(photos: Path, tmp_path: Path) -> None:
    write(photos / "val" / "lost.png", b"x")

    with pytest.raises(SourceDamaged, match="is not in a class folder"):
        convert(photos, tmp_path / "out", workers=0)

    assert not (tmp_path / "out").exists()


def test_a_missing_number_of_any_split_is_found_before_the_first_shard(
    archives: Path, tmp_path: Path
) -> None:
    for name in ("img_train.tar", "devkit_t12.tar.gz"):
        (tmp_path / f"ILSVRC2012_{name}").symlink_to(archives / f"ILSVRC2012_{name}")
    tar = (archives / "ILSVRC2012_img_val.tar").read_bytes()
    second = 512 + (int(tar[124:135], 8) + 511) // 512 * 512
    write(tmp_path / "ILSVRC2012_img_val.tar", tar[second:])

    with pytest.raises(SourceIncomplete, match="split val has 9 images, not 10"):
        convert(tmp_path, tmp_path / "out", workers=0)

    assert not (tmp_path / "out").exists()
    convert(tmp_path, tmp_path / "out", options=ConvertOptions(allow_partial=True), workers=0)


def test_problems_of_all_splits_are_one_message(photos: Path, tmp_path: Path) -> None:
    write(photos / "train" / "lost.png", b"x")
    (photos / "val" / "bird").mkdir()

    with pytest.raises(
        SourceDamaged, match=r"lost\.png: is not in a class .*; also: .*bird: this class has no"
    ):
        convert(photos, tmp_path / "out", workers=0)


def test_cases_of_one_kind_are_counted_and_the_first_is_named() -> None:
    problems = Problems()
    for name in ("a", "b", "c"):
        problems.add(SourceDamaged("is odd", path=name))
    problems.add(UsageError("has no meaning"))

    assert [str(problem) for problem in problems] == ["a: is odd (the first of 3)", "has no meaning"]
    with pytest.raises(SourceDamaged, match=r"^a: is odd \(the first of 3\); also: has no meaning$"):
        problems.raise_all()


def test_the_only_problem_is_raised_as_it_is() -> None:
    problems = Problems()
    with problems.collected():
        raise PermissionError(13, "Permission denied", "folder")

    with pytest.raises(PermissionError, match="folder"):
        problems.raise_all()
