"""Files in folders of classes as a flow."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.loaders import Flow
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.flow.sources import FromFiles
from support.flow_members import all_of

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


def test_a_folder_without_classes_takes_labels_by_name_or_in_order(folder: Path) -> None:
    flat = folder / "b"
    names = ["10.JPEG", "2.jpg", "Z.jpg", "a.jpg"]
    items = [(f"b/{name}".encode(), 7 + number) for number, name in enumerate(names)]

    by_name = Flow.from_files(flat, labels={name: 7 + number for number, name in enumerate(names)})
    in_order = Flow.from_files(flat, labels=[7, 8, 9, 10])

    assert list(by_name) == list(in_order) == items
    assert sorted(Flow.from_files(flat, labels=[7, 8, 9, 10], seed=1)) == items
    assert list(Flow.from_files(folder, labels=dict.fromkeys(ORDER, 0))) == [(n.encode(), 0) for n in ORDER]
    with by_name.map(len, processes=1) as lengths:
        assert list(lengths) == [2] * 4


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


def test_other_suffixes_may_be_asked_for(folder: Path) -> None:
    assert list(Flow.from_files(folder, suffixes=[".TXT", ".png"])) == [(b"a/notes.txt", 0), (b"a/z.png", 0)]


def test_with_a_seed_every_pass_has_an_order_of_its_own(folder: Path) -> None:
    flow = Flow.from_files(folder, seed=3)
    passes = [list(flow.at_pass(n)) for n in range(4)]
    assert all(sorted(items) == sorted(expected(ORDER)) for items in passes)
    assert len(set(map(tuple, passes))) == 4
    assert passes[2] == list(Flow.from_files(folder, seed=3).at_pass(2))
    assert passes[2] != list(Flow.from_files(folder, seed=4).at_pass(2))


@pytest.mark.parametrize("seed", [None, 5])
def test_any_files_of_a_pass_can_be_had(folder: Path, seed: int | None) -> None:
    flow = Flow.from_files(folder, seed=seed)
    whole = list(flow.at_pass(1))
    assert list(flow.pick(1, [6, 0, 0, 3])) == [whole[n] for n in (6, 0, 0, 3)]
    for wrong in (-1, 8):
        with pytest.raises(IndexError):
            list(flow.pick(1, [wrong]))


def test_a_copy_has_the_same_passes_and_what_fetches_is_small(folder: Path) -> None:
    node = FromFiles.of(folder, suffixes=None, seed=1)
    assert all_of(pickle.loads(pickle.dumps(node))) == all_of(node)  # noqa: S301
    fetch = pickle.loads(pickle.dumps(node.fetch()))  # noqa: S301
    with fetch.open() as item_of:
        assert [item_of(key) for key in node.keys(PassContext(), range(8))] == list(node.run(PassContext()))


def test_a_relative_folder_is_found_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    flow = Flow.from_files("images")
    monkeypatch.chdir("/")
    assert len(list(flow)) == 8


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert list(Flow.from_files(link)) == expected(ORDER)


def test_a_file_that_has_vanished_is_an_error_that_names_it(folder: Path) -> None:
    flow = Flow.from_files(folder)
    (folder / "a/z.png").unlink()
    items = iter(flow)
    assert [next(items), next(items)] == expected(ORDER[:2])
    with pytest.raises(FileNotFoundError) as raised:
        next(items)
    assert raised.value.filename == os.fspath(folder / "a/z.png")


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


def test_a_link_is_refused(folder: Path) -> None:
    (folder / "a/link.jpg").symlink_to(folder / "a/z.png")
    with pytest.raises(SourceDamaged, match="symbolic link"):
        Flow.from_files(folder)
