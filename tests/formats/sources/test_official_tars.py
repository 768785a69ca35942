import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardprep.formats.errors import (
    LabelConflict,
    SourceDamaged,
    SourceIncomplete,
)
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.sources.recognise import recognise
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


def replace(path: Path) -> None:
    status = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("change", [touch, grow, replace, Path.unlink])
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
