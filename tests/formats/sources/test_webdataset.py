"""Tar shards of WebDataset: what its own writer wrote comes out, and nothing is lost silently."""

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardprep.formats import SourceDamaged, UsageError, convert
from shardprep.formats.errors import DataError
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import SourceOptions
from support.datasets import converted
from support.image_files import JPEG
from support.record_sources import IMAGES, records, write_shard
from support.source_builders import tar_of


def sample(number: int) -> dict[str, bytes]:
    return {"cls": str(number % 3).encode(), "jpg": IMAGES[number]}


def numbered(*numbers: int) -> dict[str, dict[str, bytes]]:
    return {f"{number:06d}": sample(number) for number in numbers}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards in two splits, named as it is done everywhere."""
    folder = tmp_path / "shards"
    write_shard(folder / "photos-train-000000.tar", numbered(0, 1, 2, 3))
    write_shard(folder / "photos-train-000001.tar", numbered(4, 5, 6))
    write_shard(folder / "photos-val-000000.tar", numbered(7, 8))
    (folder / "README.md").write_text("photos")
    (folder / "photos-train-000001.parquet").touch()  # img2dataset writes one beside each tar
    return folder


def test_folders_beside_shards_may_be_outputs_but_not_in_a_split_and_gaps_are_noted(shards: Path) -> None:
    convert(shards, shards / "out", workers=0)
    (shards / ".hidden").touch()
    source = recognise(shards)
    assert source.splits == ("train", "val")
    assert source.listing("train").ignored == {"other files": 2, "other hidden": 1}
    (shards / "photos-train-000000.tar").rename(shards / "photos-train-000003.tar")
    (note,) = recognise(shards).listing("train").notes
    assert note == "1 file may be missing, first photos-train-000002.tar"
    (shards / "cat").mkdir()
    (shards / "cat/1.jpg").write_bytes(JPEG)
    with pytest.raises(UsageError, match=r"out: holds folders instead of images.*a list of paths"):
        recognise(shards)
    write_shard(shards.parent / "more/train/0.tar", numbered(1))
    with pytest.raises(UsageError, match="is inside the source"):
        converted(shards.parent / "more", shards.parent / "more/train/out")
    (shards.parent / "more/train").rename(shards.parent / "more/part0")
    with pytest.raises(UsageError, match=r"holds part0/0\.tar, so its folders are not classes; put all"):
        recognise(shards.parent / "more")


def test_links_are_read_on_request_and_no_output_is_made_behind_one(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links/train"
    folder.mkdir(parents=True)
    (folder / "0.tar").symlink_to(shards / "photos-val-000000.tar")
    with pytest.raises(SourceDamaged, match=r"is a symbolic link.*--follow-symlinks"):
        recognise(folder.parent)
    listing = recognise(folder.parent, options=SourceOptions(follow_symlinks=True)).listing("train")
    assert records(listing).keys() == {"000007", "000008"}
    assert listing.options == {"follow_symlinks": True}

    (tmp_path / "more").mkdir()
    (tmp_path / "more/train").symlink_to(folder)
    with pytest.raises(UsageError, match="is inside the source"):
        convert(tmp_path / "more", folder / "out", source_options=SourceOptions(True), workers=0)


ODD: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "no label": ([("1.cls", b"1"), ("1.jpg", JPEG), ("2.jpg", JPEG)], r"a\.tar, byte \d+: 2: lacks \.cls, which other"),
    "no image": ([("1.cls", b"1"), ("1.jpg", JPEG), ("2.cls", b"1")], r"byte \d+: 2: lacks an image, which other samples"),
    "a word as label": ([("1.jpg", JPEG), ("1.cls", b"cat")], r"1: its label is 'cat', not an integer .*--label-column cls takes"),
    "a huge label": ([("1.jpg", JPEG), ("1.cls", b"100000")], "label 100000; labels are 0 to 99999"),
    "a long label": ([("1.jpg", JPEG), ("1.cls", b" " * 5000)], "has 5000 bytes, more than 4096"),
    "a label that is no text": ([("1.jpg", JPEG), ("1.cls", b"\xff")], "1: .*correct the shard"),
    "a name of no label": (
        [("1.jpg", JPEG), ("1.cls", b"-1"), ("1.classname", b"ant")],
        "1: its label -1 means unlabelled, but it has the class name 'ant'",
    ),
    "two names": (
        [(f"{n}.{part}", data) for n in "ab" for part, data in (("cls", b"1"), ("classname", n.encode()))],
        "b: its label 1 is named 'b' here and 'a' elsewhere",
    ),
    "no extension": ([("1.jpg", JPEG), ("README", b"text")], r"a\.tar, byte \d+: README: has no extension"),
    "stems that are no keys": (
        [(f"{'x' * 1100}{n}.{part}", JPEG) for n in range(2) for part in ("jpg", "seg.jpg")],
        r"a\.tar, byte 0: has a name of more than 1024 .*\(the first of 2\)",
    ),
    "a part twice": ([("1.jpg", JPEG), ("1.JPG", JPEG)], r"1\.JPG: is a second member \.jpg of its sample"),
}  # fmt: skip


@pytest.mark.parametrize(("members", "message"), ODD.values(), ids=ODD)
def test_an_odd_sample_is_named(members: list[tuple[str, bytes]], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    with pytest.raises(SourceDamaged, match=message):
        recognise(tmp_path).listing("train")


def test_splits_that_do_not_agree_in_their_names_and_too_many_parts_are_refused(
    shards: Path, tmp_path: Path
) -> None:
    write_shard(tmp_path / "many.tar", {"1": {"jpg": JPEG, **{str(n): b"" for n in range(300)}}})
    write_shard(shards / "more.tar", numbered(9))
    for split, name in (("train", b"ant"), ("val", b"bee")):
        write_shard(tmp_path / split / "0.tar", {"1": {"jpg": JPEG, "cls": b"0", "classname": name}})
    with pytest.raises(UsageError, match="there are 300 columns; at most 256"):
        recognise(tmp_path / "many.tar").listing("train")
    with pytest.raises(UsageError, match=r"train-000000\.tar is named after a split and more\.tar is not"):
        recognise(shards)
    with pytest.raises(DataError, match="1: its label 0 is named 'bee' here and 'ant' elsewhere"):
        recognise(tmp_path, split="val").listing("val")


def test_a_shard_whose_name_is_not_utf8_is_named(tmp_path: Path) -> None:
    for path in (write_shard(tmp_path / os.fsdecode(b"\xff.tar"), numbered(1)), tmp_path):
        with pytest.raises(SourceDamaged, match=r"udcff\.tar: has a name that is not UTF-8; rename it"):
            recognise(path)


@pytest.mark.parametrize("part", ["caption.txt", "jpg", "tar"])
def test_samples_of_one_part_are_read_if_it_is_text_or_the_named_image(part: str, tmp_path: Path) -> None:
    members = [(".DS_Store", b""), ("._1", b""), (f"1.{part}", b"a"), ("._2", b""), (f"2.{part}", b"b")]
    (shard := tmp_path / "0.tar").write_bytes(tar_of(members))  # macOS adds those that begin with a dot
    for path, match in ((shard, "not a tar of .* unpack it, and give its"), (tmp_path, "not a known source")):
        with nullcontext() if part == "caption.txt" else pytest.raises(UsageError, match=match):
            assert [row[part] for row in records(recognise(path).listing("train")).values()] == ["a", "b"]
    if part == "jpg":
        shard.write_bytes(tar_of([(f"{n}.jpg", IMAGES[n]) for n in range(2)]))
        listing = recognise(shard, options=SourceOptions(image_column="jpg")).listing("train")
        assert [row["image"] for row in records(listing).values()] == list(IMAGES[:2])


@pytest.mark.parametrize("second", ["a.tar", "b.tar"])
def test_a_torn_sample_is_named_with_both_places(second: str, tmp_path: Path) -> None:
    shards = {"a.tar": [("1.jpg", JPEG), ("1.txt", b""), ("2.jpg", JPEG)], "b.tar": [("3.jpg", JPEG)]}
    shards[second].append(("1.cls", b"1"))
    for name, members in shards.items():
        (tmp_path / name).write_bytes(tar_of(members))

    with pytest.raises(SourceDamaged) as caught:
        recognise(tmp_path).listing("train")
    assert re.search(rf"{second}, byte \d+: 1: begins here and again at .*a\.tar, byte 0", str(caught.value))


def test_a_shard_that_changes_after_its_listing_is_not_read(shards: Path) -> None:
    listing = recognise(shards).listing("train")
    write_shard(shards / "photos-train-000001.tar", numbered(4, 5, 6))

    with pytest.raises(SourceDamaged, match="changed while it was read"):
        records(listing)


@pytest.mark.parametrize(
    ("part", "first", "second"),
    [
        ("txt", b"one", b"\xff"),
        *(("json", b"NaN", other) for other in (b"[1]", b'"x"', b"[" * 99_999, b"null")),
    ],
)
def test_a_value_that_its_column_cannot_hold_is_named(
    part: str, first: bytes, second: bytes, tmp_path: Path
) -> None:
    write_shard(tmp_path / "a.tar", {"1": {"jpg": JPEG, part: first}, "2": {"jpg": JPEG, part: second}})

    with pytest.raises(DataError, match=rf"a\.tar, byte \d+: 2: the column {part}: "):
        records(recognise(tmp_path).listing("train"))


def test_what_webdatasets_writer_writes_is_read(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.ShardWriter(str(tmp_path / "train-%06d.tar"), maxcount=4, verbose=0) as writer:
        for n in range(9):
            writer.write(
                {"__key__": f"{n:04d}", "jpg": IMAGES[n], "cls": n % 2, "txt": f"text {n}", "json": {"n": n}}
            )

    assert records(recognise(tmp_path).listing("train")) == {
        f"{n:04d}": {"label": n % 2, "image": IMAGES[n], "txt": f"text {n}", "json": {"n": n}}
        for n in range(9)
    }
