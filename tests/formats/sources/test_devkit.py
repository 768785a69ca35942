"""The development kit of ILSVRC12, the MATLAB file in it, and other sources of labels of val."""

import dataclasses
import gzip
import io
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import LabelConflict, SourceDamaged
from shardprep.formats.records.record import MAX_WORDS, LabelSpace, official_words
from shardprep.formats.sources import devkit
from shardprep.formats.sources.devkit import check_first_label, read_devkit, read_labels, read_struct_array
from shardprep.formats.sources.recognise import recognise
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
        (0, {"wnid": "n01440764"}, "invalid class .*n01440764"),
        (0, {"wnid": "fox"}, "invalid class .*'fox'"),
        (0, {"children": 1}, "not 1 to their number"),
        (0, {"children": -1}, "invalid class"),
        (1, {"train_images": -1}, "invalid class"),
        (0, {"train_images": float("inf")}, "invalid class"),
        (0, {"words": "w" * (MAX_WORDS + 1)}, "invalid class"),
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
def test_a_devkit_without_one_of_its_files_or_too_large_is_an_error(missing: str, tmp_path: Path) -> None:
    members = {META: MINI.meta(), TRUTH: b"1\n"}
    del members[missing]
    with pytest.raises(SourceDamaged, match=missing.partition("/")[2]):
        read_devkit(packed(tmp_path, tar_of(members)))
    os.truncate(tmp_path / DEVKIT, devkit.MAX_DEVKIT_BYTES + 1)
    with pytest.raises(SourceDamaged, match="is not the devkit"):
        read_devkit(tmp_path / DEVKIT)


def test_it_reads_what_scipy_reads_and_writes_and_every_truncation_is_an_error() -> None:
    meta = MINI.meta()
    expected = scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    rows = read_struct_array(meta, "synsets")
    assert len(rows) == len(expected) == 4
    for row, theirs in zip(rows, expected, strict=True):
        for field in ("ILSVRC2012_ID", "WNID", "words", "num_children", "num_train_images"):
            assert row[field] == theirs[field]
    file = io.BytesIO()
    written = np.array([(7.0, "n01440764"), (2.5, "n2")], [("id", "O"), ("wnid", "O")])
    scipy.io.savemat(file, {"other": 3.0, "synsets": written})
    assert [
        (row["id"], row["wnid"]) for row in read_struct_array(file.getvalue(), "synsets")
    ] == written.tolist()
    for end in range(len(meta)):
        with pytest.raises(ValueError, match=r"\w"):
            read_struct_array(meta[:end], "synsets")


@given(st.lists(st.tuples(st.integers(128, 900), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_whatever_bytes_of_a_file_are_changed_it_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    meta = bytearray(MINI.meta()[:128] + zlib.decompress(MINI.meta()[136:]))
    for at, value in changes:
        meta[at] = value
    with suppress(ValueError):
        assert isinstance(read_struct_array(bytes(meta), "synsets"), list)


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devkit, "MAX_INFLATED_BYTES", 1 << 20)
    head, bomb = MINI.meta()[:128], zlib.compress(bytes(8 << 20))
    packed = struct.pack("<II", 15, len(bomb)) + bomb
    for data in (head + packed, head + struct.pack("<II", 14, 8 << 20) + bytes(8 << 20)):
        with pytest.raises(ValueError, match="1048576 bytes"):
            read_struct_array(data, "synsets")


SPACE = LabelSpace.of(MINI.wnids)
HEAD = b"ImageId,PredictionString\n"


def test_an_image_of_another_name_has_no_label_and_no_words_are_too_long_for_a_manifest(
    tmp_path: Path,
) -> None:
    MINI.write_tree(tmp_path)
    MINI.write_devkit(tmp_path)
    write(tmp_path / "val/holiday.JPEG", b"x")
    with pytest.raises(LabelConflict, match="holiday: the devkit says nothing"):
        recognise(tmp_path).listing("val")

    MINI.write_kaggle(tmp_path / "kaggle")
    write(tmp_path / "kaggle/LOC_synset_mapping.txt", b"n01440764 " + b"w" * (MAX_WORDS + 1) + b"\n")
    with pytest.raises(SourceDamaged, match="more than 1000 characters"):
        recognise(tmp_path / "kaggle").listing("val")


CAFFE = b"ILSVRC2012_val_00000002.JPEG 1\n"
NO_LABELS: list[tuple[str, bytes, type[Exception], str]] = [
    ("LOC_val_solution.csv", b"Id,Label\n", LabelConflict, "says Label, which is not one of the 3 classes"),
    *(("LOC_val_solution.csv", HEAD + row, SourceDamaged, "not an image and its label") for row in (b"a\n", b"a,\n", b"a,n01440764 1,2\n")),
    ("LOC_val_solution.csv", HEAD + b"a,n01440764\na,n01440764\n", SourceDamaged, "twice"),
    ("LOC_val_solution.csv", HEAD + b"a,n01440764\n\xff", SourceDamaged, "can.t decode byte 0xff in position 37"),
    ("LOC_val_solution.csv", HEAD + b"a,n01443537 1 2 3 4\n", LabelConflict, "says n01443537, which is not one of the 3 classes"),
    *(
        ("val.txt", CAFFE + line, SourceDamaged, "is not an image and its label")
        for line in (b"ILSVRC2012_val_00000001.JPEG\n", b"ILSVRC2012_val_00000001.JPEG -1\n", b"a 1\n", b"\n")
    ),
    ("val.txt", CAFFE.replace(b"1\n", b"3\n"), LabelConflict, "says 3, which is not one of the 3 classes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "error", "message"), NO_LABELS)
def test_damaged_labels_of_val_are_an_error(
    name: str, text: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    write(tmp_path / name, text)
    with pytest.raises(error, match=message):
        read_labels(tmp_path / name, SPACE)


def test_kaggles_labels_may_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "LOC_val_solution.csv"
    path.write_bytes(b'"ImageId","PredictionString"\r\n"a","n01440764 1 2 3 4 "\r\n')
    assert read_labels(path, SPACE) == {"a": 0}


@pytest.mark.parametrize("label", [66, 490, 970])
def test_official_images_with_labels_of_another_space_are_a_conflict(label: int) -> None:
    with pytest.raises(LabelConflict, match=f"says {label}, but in sorted_wnid0 it is 65"):
        check_first_label(LabelSpace.of(official_words()), 50_000, label, "the source")
