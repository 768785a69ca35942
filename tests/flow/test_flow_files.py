"""Files in folders of classes as a flow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow

FILES = ["b/2.jpg", "b/10.JPEG", "a/z.png", "a/sub/deep/1.jpg", "a-b/1.jpg", "é/ü.jpg", "b/Z.jpg", "b/a.jpg"]
ORDER = ["a-b/1.jpg", "a/sub/deep/1.jpg", "a/z.png", "b/10.JPEG", "b/2.jpg", "b/Z.jpg", "b/a.jpg", "é/ü.jpg"]
LABELS = {"a": 0, "a-b": 1, "b": 2, "empty": 3, "é": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in [*FILES, "a/notes.txt", "b/.hidden.jpg", "README"]:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "images/empty").mkdir()
    return tmp_path / "images"


def expected(paths: list[str]) -> list[tuple[bytes, int]]:
    return [(path.encode(), LABELS[path.partition("/")[0]]) for path in paths]


def test_files_come_in_the_order_of_their_paths_bytes_with_their_classs_place(folder: Path) -> None:
    flow = Flow.from_files(folder)
    assert list(flow) == list(flow) == expected(ORDER)
    assert len(flow) == len(FILES)
    assert flow.batches_never_change


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"2.jpg": 1}, "3 files have no label in labels=, such as 10.JPEG"),
        (
            dict.fromkeys(["10.JPEG", "2.jpg", "Z.jpg", "a.jpg", "c.jpg"], 1),
            "1 files of labels= do not exist, such as c",
        ),
        ([1, 2, 3], "has 4 files, and labels= has 3"),
        ([1, 2, 3, "4"], "a label must be a whole number"),
        (5, "labels= must have a label for each file"),
    ],
    ids=str,
)
def test_labels_that_are_not_one_for_each_file_are_refused(folder: Path, labels: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Flow.from_files(folder / "b", labels=labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffixes": [".tiff"]}, "no files in folders of classes that end in .tiff"),
        ({"suffixes": []}, "no files"),
        ({"suffixes": ".jpg"}, "give \\['.jpg'\\]"),
        ({"seed": -1}, "seed must be"),
        ({"seed": True}, "seed must be"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(folder: Path, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Flow.from_files(folder, **options)


def test_a_folder_that_is_none_is_refused(folder: Path) -> None:
    for wrong in (folder / "nowhere", folder / "README"):
        with pytest.raises(UsageError, match="is not a folder"):
            Flow.from_files(wrong)


def test_an_image_in_no_class_is_refused(folder: Path) -> None:
    (folder / "loose.jpg").touch()
    with pytest.raises(UsageError, match=r"loose.jpg: is not in a class folder"):
        Flow.from_files(folder)
