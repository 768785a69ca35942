import dataclasses
import gzip
from pathlib import Path

import pytest

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources import devkit
from shardprep.formats.sources.devkit import read_devkit
from shardprep.formats.sources.sample import meta_mat
from support.source_builders import (
    DEVKIT,
    GROUND_TRUTH_IN_FOLDER,
    META,
    META_IN_FOLDER,
    TRUTH,
    Miniature,
    tar_of,
    write,
)

MINI = Miniature()


def packed(folder: Path, tar: bytes) -> Path:
    path = folder / DEVKIT
    path.write_bytes(gzip.compress(tar, 1))
    return path


def with_synset(at: int, **changes: object) -> bytes:
    synsets = MINI.synsets()
    synsets[at] = dataclasses.replace(synsets[at], **changes)  # type: ignore[arg-type]
    return MINI.devkit_tar(meta=meta_mat(synsets))


@pytest.mark.parametrize("form", ["gz", "tar", "folder"])
def test_the_devkit_is_read_in_each_of_its_forms(form: str, tmp_path: Path) -> None:
    path = packed(tmp_path, MINI.devkit_tar())
    if form == "tar":
        path = tmp_path / "ILSVRC2012_devkit_t12.tar"
        path.write_bytes(MINI.devkit_tar())
    if form == "folder":
        path = tmp_path / "ILSVRC2012_devkit_t12"
        write(path / META_IN_FOLDER, MINI.meta())
        write(path / GROUND_TRUTH_IN_FOLDER, b"3\r\n1\r\n2\r\n2\r\n")
    kit = read_devkit(path)
    assert [(c.name, c.words, c.ilsvrc2012_id) for c in kit.classes.classes] == [
        ("n01440764", "word n01440764", 2),
        ("n02100735", "word n02100735", 3),
        ("n02119789", "word n02119789", 1),
    ]
    assert kit.train_images == {"n01440764": 2, "n02100735": 1, "n02119789": 3}
    assert kit.ground_truth == (3, 1, 2, 2)


@pytest.mark.parametrize(
    ("at", "changes", "message"),
    [
        (0, {"wnid": "n01440764"}, "same WNID"),
        (0, {"wnid": "fox"}, "'fox' is no WNID"),
        (0, {"children": (1,)}, "not 1 to their number"),
        (1, {"wnid": ""}, "'' is no WNID"),
        (1, {"train_images": -1}, "not a whole number"),
        (1, {"train_images": 1.5}, "not a whole number"),
    ],
)
def test_classes_that_cannot_be_are_an_error(
    at: int, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceDamaged, match=message):
        read_devkit(packed(tmp_path, with_synset(at, **changes)))


@pytest.mark.parametrize(
    "truth", [b"1\n2\n4\n", b"0\n", b"1\n\n2\n", b"1_0\n", b"-1\n", b"+1\n", b"x\n", b"\xff\n"]
)
def test_a_ground_truth_that_cannot_be_is_an_error_that_names_the_line(truth: bytes, tmp_path: Path) -> None:
    with pytest.raises(SourceDamaged, match=r"line \d is not a number from 1 to 3"):
        read_devkit(packed(tmp_path, MINI.devkit_tar(truth=truth)))


@pytest.mark.parametrize("missing", [META, TRUTH])
def test_a_devkit_without_one_of_its_files_is_an_error(missing: str, tmp_path: Path) -> None:
    members = {META: MINI.meta(), TRUTH: b"1\n"}
    del members[missing]
    with pytest.raises(SourceDamaged, match=missing.partition("/")[2]):
        read_devkit(packed(tmp_path, tar_of(members)))


def test_a_devkit_too_large_even_when_packed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / DEVKIT
    with path.open("wb") as file:
        file.truncate(devkit.MAX_DEVKIT_BYTES + 1)
    with pytest.raises(SourceDamaged, match="is not the devkit"):
        read_devkit(path)
