"""Archives are read as they are, and a damaged or hostile one is an error, never a smaller dataset."""

import hashlib
import os
import shutil
import stat
import tarfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats import ConvertOptions, convert, convert_part, fetch, join, publish, repair
from shardprep.formats.errors import LabelConflict, SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.shards.manifest import read_manifest
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.sample import make_sample
from shardprep.formats.sources.tar import (
    MAX_EXTENSION_BYTES,
    OFFICIAL_FILES,
    Member,
    describe_archive,
    walk_tar,
)
from support.datasets import flip, prep_here
from support.file_changes import CHANGES
from support.source_builders import BLOCK, DEVKIT, TRAIN, VAL, Miniature, header, headers_in, tar_of, write

END = bytes(2 * BLOCK)
LONG = "/".join(["folder"] * 20) + "/a.JPEG"
THREE = {"a.JPEG": b"a" * 700, "b.JPEG": b"", "c.JPEG": b"c" * 512}


def listed(tar: bytes) -> list[Member]:
    return list(walk_tar(lambda length, offset: tar[offset : offset + length], archive="x.tar", end=len(tar)))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def record(text: str) -> bytes:
    """A pax record with its length in front, which counts its own digits."""
    body = f" {text}\n".encode()
    return str(next(n for n in range(1000) if n == len(str(n)) + len(body))).encode() + body


def pax(records: bytes) -> bytes:
    return header("pax", len(records), b"x") + padded(records)


def header_with(data: bytes, at: int, style: int = tarfile.USTAR_FORMAT) -> bytes:
    block = bytearray(tarfile.TarInfo("a").tobuf(style))
    block[at : at + len(data)] = data
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


names = st.lists(st.text("abcé日.-_ ", min_size=1, max_size=90), min_size=1, max_size=3).map("/".join)


@given(
    members=st.dictionaries(names, st.binary(max_size=1100), max_size=4),
    style=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_standard_library_writes_is_read_alike(members: dict[str, bytes], style: int) -> None:
    plain = {n: d for n, d in members.items() if not {".", ".."} & set(n.split("/"))}
    tar = tar_of(plain, style=style)
    assert {m.name: tar[m.offset : m.offset + m.size] for m in listed(tar)} == plain


UNDERSTOOD = {
    "folders and a leading dot": (
        header("./", 0, b"5") + header("./sub/", 0, b"5") + header("./sub/a") + END,
        Member("sub/a", 3 * BLOCK, 0),
    ),
    "a size in base 256": (header("a", size_field=b"\x80" + (3).to_bytes(11, "big")) + padded(b"abc") + END, Member("a", BLOCK, 3)),
    "a path and a size of pax": (
        pax(record("path=é") + record("size=3")) + header("other", 0) + padded(b"abc") + END,
        Member("é", 3 * BLOCK, 3),
    ),
    "a global comment of pax": (header("g", 13, b"g") + padded(record("comment=a")) + header("a") + END, Member("a", 3 * BLOCK, 0)),
    "GNU's time in place of a prefix": (header_with(b"14670000000\0", 345, tarfile.GNU_FORMAT) + END, Member("a", BLOCK, 0)),
    "a prefix of ustar": (tar_of({LONG: b""}, style=tarfile.USTAR_FORMAT), Member(LONG, BLOCK, 0)),
}  # fmt: skip


@pytest.mark.parametrize(("tar", "member"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_what_other_programs_write_is_understood(tar: bytes, member: Member) -> None:
    assert listed(tar) == [member]


def test_a_changed_byte_in_any_header_is_an_error_and_never_another_listing() -> None:
    tar = tar_of(THREE)
    whole = listed(tar)
    for start in headers_in(tar):
        for at in range(start, start + BLOCK):
            for bits in (0x01, 0x10, 0xFF):
                damaged = bytearray(tar)
                damaged[at] ^= bits
                try:
                    assert listed(bytes(damaged)) == whole
                except SourceDamaged:
                    continue


def test_an_archive_cut_off_anywhere_is_an_error_or_has_lost_only_padding() -> None:
    tar = tar_of(THREE)
    needed = len(padded(tar.rstrip(b"\0"))) + len(END)
    for end in range(0, len(tar), 256):
        if end < needed:
            with pytest.raises(SourceDamaged):
                listed(tar[:end])
        else:
            assert listed(tar[:end]) == listed(tar)
    with pytest.raises(SourceDamaged, match="truncated"):  # since it was opened
        list(walk_tar(lambda length, offset: tar[offset : 3 * BLOCK][:length], archive="x.tar", end=len(tar)))


def gnu_sparse() -> bytes:
    info = tarfile.TarInfo("bomb")
    info.type = tarfile.GNUTYPE_SPARSE
    return info.tobuf(tarfile.GNU_FORMAT)


PATHS = ["/etc/passwd", "../a", "a/../b", "a//b", "a/.", "..", "a\\b", "./", "C:\\a", ""]
SIZES = [
    b"\x80" + (1 << 60).to_bytes(11, "big"),
    b"\x80" + bytes([255]) * 11,
    b"\xff" * 11 + b"\xfe",
    *(b"77777777777\0", b"-0000000001\0", b"0000_000001\0", b"           \0"),
]
RECORDS = [
    *(b"garbage", b"99 path=a\n", b"9 path=aa\n", b"0 path=a\n", b"9 path=ab"),
    record("path=b") + record("path=c"),
    *map(record, ("no value", "path=a\0", "path=", "path=../a", "size=-1", "size=99999999999999999999")),
    record("size=1152921504606846976"),
]
LONG_NAME = header("L", 2, b"L") + padded(b"a\0")
HUGE = MAX_EXTENSION_BYTES + 1
HOSTILE: list[tuple[bytes, str]] = [
    *((header(name) + END, "name") for name in [*PATHS, b"a\0b", b"\xff\xfe"]),
    *((header("a", size_field=size) + END, "at byte 0") for size in SIZES),
    *((pax(records) + header("a") + END, r"at byte \d+, member .*: (the pax|its|ext)") for records in RECORDS),
    *(
        (header("a") + header("b", 0, kind) + END, r"at byte 512, member 'b': it is")
        for kind in (b"1", b"2", b"3", b"4", b"6", b"7", b"K", b"S", b"V", b"M", b"A")
    ),
    *((header("a") + end, "end mark") for end in (b"", bytes(BLOCK), bytes(BLOCK + 511))),
    (header("a") + bytes(BLOCK) + header("b") + END, "data after a block"),
    (header("a") + END + bytes(2 << 20) + b"x", "data after a block"),
    (pax(record("GNU.sparse.major=1") + record("GNU.sparse.realsize=8589934592")) + header("a") + END, "sparse"),
    (gnu_sparse() + END, "sparse"),
    (header("g", 11, b"g") + padded(record("path=ab")) + header("a") + END, "global"),
    (LONG_NAME + END, "no member"),
    (LONG_NAME + LONG_NAME + header("b") + END, "or two"),
    (header("L", HUGE, b"L") + padded(b"a" * HUGE) + header("b") + END, "extended header"),
    (header("a") + header("./a") + END, r"member './a': its name occurs twice"),
    (header_with(bytes(8), 257) + END, "magic"),
    (header("a") + header("d/", BLOCK, b"5") + header("b") + END, "member 'd/': it is a folder with data"),
]  # fmt: skip


@pytest.mark.parametrize(("tar", "match"), HOSTILE)
def test_a_damaged_or_hostile_archive_is_an_error(tar: bytes, match: str) -> None:
    with pytest.raises(SourceDamaged, match=match):
        listed(tar)


@pytest.fixture
def mini_tars(tmp_path: Path) -> Path:
    return Miniature().write_tars(tmp_path / "mini_tars")


@pytest.mark.parametrize("name", [TRAIN, DEVKIT, "LOC_val_solution.csv", "val.txt"])
def test_a_fifo_in_place_of_a_file_is_not_waited_for(name: str, mini_tars: Path) -> None:
    (mini_tars / name).unlink(missing_ok=True)
    os.mkfifo(mini_tars / name)
    if name == "val.txt":
        assert len(recognise(mini_tars).listing("val").entries) == 4
    else:
        with pytest.raises(SourceDamaged, match="is not a regular file"):
            [recognise(mini_tars).listing(split) for split in ("train", "val")]


@pytest.mark.parametrize(
    "members",
    [
        *(
            {"n01440764.tar": tar_of({name: b"x"})}
            for name in ("n02100735_1.JPEG", "n01440764_1.png", "sub/n01440764_1.JPEG", "n01440764_x.JPEG")
        ),
        {"n01440764.tar": END, "readme.txt": b"hello"},
        {"n01440764.tar": END, "n1.tar": END},
        {"n01443537.tar": tar_of({"n01443537_1.JPEG": b"x"})},
    ],
)
def test_a_member_of_another_name_or_class_is_an_error(members: dict[str, bytes], mini_tars: Path) -> None:
    (mini_tars / TRAIN).write_bytes(tar_of(members))
    with pytest.raises(
        (SourceDamaged, LabelConflict), match=r"does not belong here|n01443537 is not in the devkit"
    ):
        recognise(mini_tars).listing("train")


def test_an_image_of_absurd_size_is_refused_before_it_is_read(mini_tars: Path) -> None:
    with (mini_tars / VAL).open("wb") as file:
        file.write(header("ILSVRC2012_val_00000001.JPEG", MAX_IMAGE_BYTES + 1))
        file.truncate(MAX_IMAGE_BYTES + 10 * BLOCK)
    with pytest.raises(SourceDamaged, match="has 67108865 bytes"):
        recognise(mini_tars).listing("val")


def test_val_without_labels_is_an_error_that_says_what_to_add(mini_tars: Path) -> None:
    (mini_tars / DEVKIT).unlink()
    with pytest.raises(
        SourceIncomplete, match=r"devkit_t12\.tar\.gz, LOC_val_solution\.csv or Caffe's val\.txt"
    ):
        recognise(mini_tars).listing("val")


@pytest.mark.parametrize("change", ["touched", "grown", "a copy", "gone"])
def test_an_archive_that_changes_while_it_is_read_or_since_it_was_listed_is_an_error(
    change: str, mini_tars: Path
) -> None:
    listing = recognise(mini_tars).listing("train")
    with pytest.raises(SourceDamaged, match="changed while it was read"), listing.reader.open():
        CHANGES[change](mini_tars / TRAIN)
    with pytest.raises((SourceDamaged, FileNotFoundError)), listing.reader.open():
        pass


def test_an_archive_that_lost_its_end_is_an_error_at_the_image(mini_tars: Path) -> None:
    listing = recognise(mini_tars).listing("val")
    last = listing.entries[listing.entries["offset"].argmax()]
    opened = listing.reader.open()
    reader = opened.__enter__()
    os.truncate(mini_tars / VAL, int(last["offset"]) + 1)
    with pytest.raises(SourceDamaged, match="ends before the image does"):
        reader.read(last)
    with pytest.raises(SourceDamaged, match="changed while it was read"):
        opened.__exit__(None, None, None)


def test_a_disk_error_stays_an_os_error_that_names_the_file(
    mini_tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, length: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    listing = recognise(mini_tars).listing("val")
    with listing.reader.open() as reader:
        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(OSError, match=VAL) as caught:
            reader.read(listing.entries[0])
    assert caught.value.errno == 5


def made_official(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the archives in the folder the official ones for the test."""
    for name in (TRAIN, VAL, DEVKIT):
        data = (folder / name).read_bytes()
        monkeypatch.setitem(OFFICIAL_FILES, name, hashlib.md5(data, usedforsecurity=False).hexdigest())
    return folder


def test_an_archive_with_an_official_name_is_checked_by_md5_on_request(
    mini_tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    officials = made_official(mini_tars, monkeypatch)
    plain = recognise(officials).listing("train").archives
    progress = Mock(wraps=NoProgress())
    checked = recognise(officials, check_md5=True, progress=progress).listing("val").archives
    flip(officials / TRAIN, 1200)
    with pytest.raises(SourceDamaged, match=f"has MD5 .*, not {OFFICIAL_FILES[TRAIN]}"):
        recognise(officials, check_md5=True).listing("train")
    renamed = describe_archive((officials / VAL).rename(officials / "mine.tar"), check_md5=True)

    assert [(a.name, a.md5) for a in plain] == [(TRAIN, None), (DEVKIT, None)]
    assert [(a.name, a.md5) for a in checked] == [(name, OFFICIAL_FILES[name]) for name in (VAL, DEVKIT)]
    assert renamed.md5 is None
    titles = ["list val", *(f"check the MD5 of {name}" for name in (VAL, DEVKIT))]
    assert [task.args[0] for task in progress.task.call_args_list] == titles
    assert progress.at.call_args == call(0, (officials / DEVKIT).stat().st_size)


def test_checked_md5s_are_under_the_root_and_stay_there(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    officials = made_official(archives, monkeypatch)
    plain, checked = (
        convert(officials, tmp_path / name, split="val", options=ConvertOptions(check_md5=check), workers=0)[
            0
        ]
        for name, check in (("plain", False), ("md5", True))
    )
    expected = {name: OFFICIAL_FILES[name] for name in (VAL, DEVKIT)}
    manifest = checked.manifest

    assert (plain.manifest.archive_md5, manifest.archive_md5) == ({}, expected)
    assert manifest.root != plain.manifest.root
    assert replace(manifest, source=plain.manifest.source) == plain.manifest
    inspected = prep_here("inspect", checked.path).stdout
    assert f"official MD5  {expected[VAL]} of {VAL}, {expected[DEVKIT]} of" in inspected
    assert convert(officials, checked.path, split="val", workers=0)[0].manifest.root == manifest.root
    checks = {"split": "val", "options": ConvertOptions(check_md5=True), "workers": 0}
    convert_part(officials, tmp_path / "parts", (1, 1), **checks)
    assert convert(officials, tmp_path / "parts", **checks)[0].manifest == manifest

    (checked.path / manifest.shards[0].name).unlink()
    repair(checked.path, officials, workers=0).raise_for_findings()
    publish(checked.path, (tmp_path / "bucket").as_uri())
    fetch((tmp_path / "bucket").as_uri(), tmp_path / "copy")
    assert read_manifest(tmp_path / "copy") == manifest
    np.save(tmp_path / "scores.npy", np.arange(manifest.records))
    assert join(checked.path, {"score": tmp_path / "scores.npy"}, workers=0).manifest.archive_md5 == expected


def test_an_archive_alone_is_converted_and_checking_its_md5_changes_nothing(
    archives: Path, tmp_path: Path
) -> None:
    source = shutil.copy(archives / TRAIN, tmp_path / "mine.tar")
    options = [ConvertOptions(allow_partial=True, check_md5=check) for check in (False, True)]

    plain, checked = (
        convert(source, tmp_path / str(n), split="train", options=given, workers=0)[0].manifest
        for n, given in enumerate(options)
    )

    assert (plain.root, plain.records) == (checked.root, 24)
    (whole := tmp_path / "21k.tar").write_bytes(tar_of({"n00004475.tar": tar_of({"n00004475_1.JPEG": b"x"})}))
    assert recognise(whole).expected_count("train") is None  # the number of images is known for ILSVRC12 only


@pytest.mark.parametrize(
    "wrong",
    [*({name: 0} for name in ("classes", "train_per_class", "val", "test")), {"classes": 1001}, {"seed": -1}],
)
def test_impossible_numbers_are_refused_before_writing_anything(
    tmp_path: Path, wrong: dict[str, int]
) -> None:
    name = next(iter(wrong)).replace("_", "-")
    with pytest.raises(UsageError, match=f"^{name} (is|must be) "):
        make_sample(tmp_path / "new", **wrong)
    assert list(tmp_path.iterdir()) == []


def test_archives_that_are_there_are_never_overwritten_but_what_a_killed_run_left(tmp_path: Path) -> None:
    names = ("ILSVRC2012_img_train.tar", "ILSVRC2012_bbox_val_v3.tgz")
    for name in names:
        write(tmp_path / name / name, b"precious")
        with pytest.raises(UsageError, match=f"{name}: exists already"):
            make_sample(tmp_path / name, classes=1, train_per_class=1, val=1)
        assert [path.read_bytes() for path in (tmp_path / name).iterdir()] == [b"precious"]

    write(tmp_path / "new" / f"{names[0]}.partial", b"half")
    made = make_sample(tmp_path / "new", classes=1, train_per_class=1, val=1, test=1)
    left = {path.name: path.stat().st_mode & stat.S_IWUSR for path in (tmp_path / "new").iterdir()}
    assert left == {file.name: stat.S_IWUSR for file in made.files}
