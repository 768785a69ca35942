"""The development kit of ILSVRC12, and the MATLAB file in it."""

import dataclasses
import gzip
import io
import struct
import zlib
from pathlib import Path

import pytest
import scipy.io

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import MAX_WORDS
from shardprep.formats.sources import devkit
from shardprep.formats.sources.devkit import (
    MAX_DIMENSIONS,
    MAX_FIELDS,
    MAX_VALUES,
    read_devkit,
    read_struct_array,
)
from shardprep.formats.sources.sample import DOUBLE, INT8, INT32, MATRIX, STRUCT, UINT32, element, meta_mat
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
        (0, {"train_images": float("inf")}, "not a whole number"),
        (0, {"train_images": 2.0**70}, "not a whole number"),
        (0, {"words": "w" * (MAX_WORDS + 1)}, "longer than"),
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


def test_it_reads_what_scipy_reads() -> None:
    meta = MINI.meta()
    expected = scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    rows = read_struct_array(meta, "synsets")
    assert len(rows) == len(expected) == 4
    for row, theirs in zip(rows, expected, strict=True):
        for field in ("ILSVRC2012_ID", "WNID", "words", "num_children", "num_train_images"):
            assert row[field] == theirs[field]


def test_every_truncation_is_an_error() -> None:
    meta = MINI.meta()
    for end in range(len(meta)):
        with pytest.raises(ValueError, match=r"\w"):
            read_struct_array(meta[:end], "synsets")


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devkit, "MAX_INFLATED_BYTES", 1 << 20)
    head, bomb = MINI.meta()[:128], zlib.compress(bytes(8 << 20))
    packed = struct.pack("<II", 15, len(bomb)) + bomb
    plain = struct.pack("<II", 14, 8 << 20) + bytes(8 << 20)
    for data in (head + packed, head + plain):
        with pytest.raises(ValueError, match="1048576 bytes"):
            read_struct_array(data, "synsets")


FLAGS = element(UINT32, struct.pack("<II", STRUCT, 0))
DIMENSIONS = element(INT32, struct.pack("<2i", 1, 1))
NAME = element(INT8, b"synsets")
LENGTH = element(INT32, struct.pack("<i", 2))
FIELD = element(INT8, b"a\0")
CELL = element(MATRIX, b"")


def mat(
    *,
    flags: bytes = FLAGS,
    dimensions: bytes = DIMENSIONS,
    length: bytes = LENGTH,
    names: bytes = FIELD,
    cells: bytes = CELL,
) -> bytes:
    """A MATLAB 5 file with a struct array made of these parts."""
    array = flags + dimensions + NAME + length + names + cells
    return bytes(124) + b"\x00\x01IM" + element(MATRIX, array)


def doubles(*numbers: float) -> bytes:
    return element(DOUBLE, struct.pack(f"<{len(numbers)}d", *numbers))


HOSTILE_MATS = {
    "many dimensions": mat(dimensions=element(INT32, b"\xff\xff\xff\x7f" * (MAX_DIMENSIONS + 1))),
    "dimensions of no whole numbers": mat(dimensions=doubles(1.0, 1.0)),
    "infinite dimensions": mat(dimensions=doubles(float("inf"), 1.0)),
    "negative dimensions": mat(dimensions=element(INT32, struct.pack("<2i", -1, -1))),
    "an infinite length of names": mat(length=doubles(float("inf"))),
    "a length of names that is none": mat(length=doubles(float("nan"))),
    "no length of names": mat(length=element(INT32, struct.pack("<i", 0))),
    "infinite flags": mat(flags=doubles(float("inf"))),
    "many fields": mat(names=element(INT8, b"a\0" * (MAX_FIELDS + 1))),
    "many values": mat(cells=CELL * (MAX_VALUES + 1)),
}


@pytest.mark.parametrize("meta", HOSTILE_MATS.values(), ids=HOSTILE_MATS)
def test_a_mat_file_that_declares_what_cannot_be_is_refused_before_it_is_counted(
    meta: bytes, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"whole numbers|more than|not a struct array|not complete"):
        read_struct_array(meta, "synsets")

    (tmp_path / DEVKIT).write_bytes(gzip.compress(MINI.devkit_tar(meta=meta)))
    with pytest.raises(SourceDamaged, match=DEVKIT):
        read_devkit(tmp_path / DEVKIT)
