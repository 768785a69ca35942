"""The official archives: what does not belong in them is an error, and their MD5 is kept."""

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import (
    ConvertOptions,
    convert,
    convert_part,
    fetch,
    join,
    publish,
    repair,
)
from shardprep.formats.errors import (
    LabelConflict,
    SourceDamaged,
    SourceIncomplete,
    UsageError,
)
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.shards.manifest import read_manifest
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.sample import make_sample
from shardprep.formats.sources.tar import OFFICIAL_FILES, OfficialFile, archive_of, check_md5
from support.datasets import prep_here
from support.source_builders import (
    BLOCK,
    DEVKIT,
    TRAIN,
    VAL,
    Miniature,
    header,
    tar_of,
)

MINI = Miniature()
END = bytes(2 * BLOCK)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    return MINI.write_tars(tmp_path / "tars")


@pytest.mark.parametrize("name", [TRAIN, DEVKIT, "LOC_val_solution.csv", "val.txt"])
def test_a_fifo_in_place_of_a_file_is_not_waited_for(name: str, tars: Path) -> None:
    (tars / name).unlink(missing_ok=True)
    os.mkfifo(tars / name)
    if name == "val.txt":
        assert len(recognise(tars).listing("val").entries) == 4
    else:
        with pytest.raises(SourceDamaged, match="is not a regular file"):
            [recognise(tars).listing(split) for split in ("train", "val")]


@pytest.mark.parametrize(
    "members",
    [
        {"n01440764.tar": tar_of({"n02100735_1.JPEG": b"x"})},
        {"n01440764.tar": tar_of({"n01440764_1.png": b"x"})},
        {"n01440764.tar": tar_of({"sub/n01440764_1.JPEG": b"x"})},
        {"n01440764.tar": tar_of({"n01440764_x.JPEG": b"x"})},
        {"n01440764.tar": END, "readme.txt": b"hello"},
        {"n01440764.tar": END, "n1.tar": END},
    ],
)
def test_a_member_of_another_name_is_an_error(members: dict[str, bytes], tars: Path) -> None:
    (tars / TRAIN).write_bytes(tar_of(members))
    with pytest.raises(SourceDamaged, match="does not belong here"):
        recognise(tars).listing("train")


def test_an_image_of_absurd_size_is_refused_before_it_is_read(tars: Path) -> None:
    with (tars / VAL).open("wb") as file:
        file.write(header("ILSVRC2012_val_00000001.JPEG", MAX_IMAGE_BYTES + 1))
        file.truncate(MAX_IMAGE_BYTES + 10 * BLOCK)
    with pytest.raises(SourceDamaged, match="has 67108865 bytes"):
        recognise(tars).listing("val")


def test_a_class_that_the_devkit_does_not_know_is_a_conflict(tars: Path) -> None:
    (tars / TRAIN).write_bytes(tar_of({"n01443537.tar": tar_of({"n01443537_1.JPEG": b"x"})}))
    with pytest.raises(LabelConflict, match="n01443537 is not in the devkit"):
        recognise(tars).listing("train")


def test_val_without_labels_is_an_error_that_says_what_to_add(tars: Path) -> None:
    (tars / DEVKIT).unlink()
    with pytest.raises(
        SourceIncomplete, match=r"devkit_t12\.tar\.gz, LOC_val_solution\.csv or Caffe's val\.txt"
    ):
        recognise(tars).listing("val")


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(BLOCK))


def exchange(path: Path) -> None:
    status = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("change", [touch, grow, exchange, Path.unlink])
def test_an_archive_that_changes_while_it_is_read_or_since_it_was_listed_is_an_error(
    change: Callable[[Path], None], tars: Path
) -> None:
    listing = recognise(tars).listing("train")
    with pytest.raises(SourceDamaged, match="changed while it was read"), listing.reader:
        change(tars / TRAIN)
    with pytest.raises((SourceDamaged, FileNotFoundError)), listing.reader:
        pass


def test_an_archive_that_lost_its_end_is_an_error_at_the_image(tars: Path) -> None:
    listing = recognise(tars).listing("val")
    last = listing.entries[listing.entries["offset"].argmax()]
    reader = listing.reader.__enter__()
    os.truncate(tars / VAL, int(last["offset"]) + 1)
    with pytest.raises(SourceDamaged, match="ends before the image does"):
        reader.read(last)
    with pytest.raises(SourceDamaged, match="changed while it was read"):
        reader.__exit__(None, None, None)


def test_a_disk_error_stays_an_os_error_that_names_the_file(
    tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, length: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    listing = recognise(tars).listing("val")
    with listing.reader as reader:
        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(OSError, match=VAL) as caught:
            reader.read(listing.entries[0])
    assert caught.value.errno == 5


@pytest.fixture
def officials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A miniature with archives that are made the official ones for the test, by size."""
    return made_official(Miniature().write_tars(tmp_path), monkeypatch)


def made_official(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (TRAIN, VAL, DEVKIT):
        data = (folder / name).read_bytes()
        md5 = hashlib.md5(data, usedforsecurity=False)
        size = None if name == DEVKIT else len(data)
        monkeypatch.setitem(OFFICIAL_FILES, name, OfficialFile(size, md5.hexdigest()))
    return folder


def test_an_archive_is_known_by_name_and_size_without_reading_it(officials: Path) -> None:
    archives = recognise(officials).listing("train").archives
    assert [(a.name, a.md5, a.verified) for a in archives] == [(TRAIN, None, "size"), (DEVKIT, None, "no")]


def test_on_request_archives_are_known_by_md5(officials: Path) -> None:
    archives = recognise(officials, check_md5=True).listing("val").archives
    assert [(a.name, a.md5, a.verified) for a in archives] == [
        (name, OFFICIAL_FILES[name].md5, "md5") for name in (VAL, DEVKIT)
    ]


def test_checked_md5s_are_under_the_root_and_stay_there(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    officials = made_official(archives, monkeypatch)
    plain, checked = (
        convert(
            officials,
            tmp_path / name,
            split="val",
            options=ConvertOptions(check_md5=name == "md5"),
            workers=0,
        )[0]
        for name in ("plain", "md5")
    )
    expected = {name: OFFICIAL_FILES[name].md5 for name in (VAL, DEVKIT)}
    manifest = checked.manifest

    assert (plain.manifest.archive_md5, manifest.archive_md5) == ({}, expected)
    assert manifest.root != plain.manifest.root
    assert replace(manifest, source=plain.manifest.source) == plain.manifest
    inspected = prep_here("inspect", checked.path).stdout
    assert f"official MD5  {expected[VAL]} of {VAL}, {expected[DEVKIT]} of" in inspected
    assert convert(officials, checked.path, split="val", workers=0)[0].manifest.root == manifest.root

    (checked.path / manifest.shards[0].name).unlink()
    repair(checked.path, officials, workers=0).raise_for_findings()
    publish(checked.path, (tmp_path / "bucket").as_uri())
    fetch((tmp_path / "bucket").as_uri(), tmp_path / "copy")
    assert read_manifest(tmp_path / "copy") == manifest
    np.save(tmp_path / "scores.npy", np.arange(manifest.records))
    assert join(checked.path, {"score": tmp_path / "scores.npy"}, workers=0).manifest.archive_md5 == expected


def test_parts_do_not_lose_checked_md5s(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    officials = made_official(archives, monkeypatch)
    options = ConvertOptions(check_md5=True)
    convert_part(officials, tmp_path / "out", (1, 1), split="val", options=options, workers=0)

    (done,) = convert(officials, tmp_path / "out", split="val", options=options, workers=0)

    assert done.manifest.archive_md5.keys() == {VAL, DEVKIT}


def test_an_archive_of_another_size_is_not_verified(officials: Path) -> None:
    with (officials / TRAIN).open("ab") as file:
        file.write(bytes(512))
    assert archive_of(officials / TRAIN).verified == "no"


def test_an_official_name_with_another_md5_is_an_error(officials: Path) -> None:
    data = bytearray((officials / TRAIN).read_bytes())
    data[1200] ^= 1
    (officials / TRAIN).write_bytes(data)
    with pytest.raises(SourceDamaged, match=f"has MD5 .*, not {OFFICIAL_FILES[TRAIN].md5}"):
        recognise(officials, check_md5=True).listing("train")


def test_a_file_of_another_name_has_an_md5_that_nothing_confirms(officials: Path) -> None:
    renamed = (officials / TRAIN).rename(officials / "mine.tar")
    archive = check_md5(renamed)
    assert archive.md5 == OFFICIAL_FILES[TRAIN].md5
    assert archive.verified == "no"


COUNTS = {"classes": 10, "train_per_class": 8, "val": 30, "test": 7}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_child(code: str, **environment: str) -> subprocess.Popen[bytes]:
    imports = "from pathlib import Path\nfrom shardprep.formats.sources.sample import make_sample\n"
    return subprocess.Popen([sys.executable, "-c", imports + code], env={**os.environ, **environment})


@pytest.mark.torture
def test_the_same_arguments_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    make_sample(tmp_path / "new" / "folder", **COUNTS)
    code = f"make_sample(Path({str(tmp_path / 'other')!r}), **{COUNTS})"
    with in_child(code, TZ="Asia/Tokyo", PYTHONHASHSEED="7") as child:
        assert child.wait() == 0
    assert content(tmp_path / "other") == content(tmp_path / "new" / "folder")


@pytest.mark.parametrize("wrong", [{name: 0} for name in COUNTS] + [{"classes": 1001}, {"seed": -1}])
def test_impossible_numbers_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, int]
) -> None:
    name = next(iter(wrong)).replace("_", "-")
    with pytest.raises(UsageError, match=f"^{name} is "):
        make_sample(tmp_path / "new", **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_bbox_val_v3.tgz"])
def test_archives_that_are_there_are_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(UsageError, match=f"{name}: exists already"):
        make_sample(tmp_path, classes=1, train_per_class=1, val=1)
    assert content(tmp_path) == {name: b"precious"}


def test_what_a_killed_run_left_is_overwritten_and_archives_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar.partial").write_bytes(b"half")

    made = make_sample(tmp_path, classes=1, train_per_class=1, val=1, test=1)

    assert content(tmp_path).keys() == {file.name for file in made.files}
    assert all(path.stat().st_mode & stat.S_IWUSR for path in tmp_path.iterdir())
