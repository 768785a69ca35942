"""Images with partners in other folders, such as masks."""

from pathlib import Path

import pytest

from shardprep.formats import SourceOptions, convert, open_dataset, repair
from shardprep.formats.errors import DataError, ShardprepError, UsageError
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.sources.recognise import recognise
from support.column_sources import picture, write_pictures
from support.datasets import prep_here
from support.source_builders import write

NAMES = [f"{number}.png" for number in range(5)]
MASKS = SourceOptions(pairs=("mask=masks",))


def test_class_folders_give_labels_and_pairs_may_lie_anywhere(tmp_path: Path) -> None:
    names = ["cat/1.png", "dog/1.png"]
    write_pictures(tmp_path / "s/train", names)
    write_pictures(tmp_path / "masks/train", names, grey=True)
    write_pictures(tmp_path / "s/train/depth", names, grey=True)
    options = SourceOptions(pairs=(f"mask={tmp_path / 'masks'}", "depth=depth"))

    (done,) = convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=options)

    assert done.manifest.schema.names == ("mask", "depth")
    with open_dataset(done.path) as opened:
        assert {record.key: record.label for record in opened} == {"cat/1.png": 0, "dog/1.png": 1}
    (done.path / "shard-00000.lmdb").unlink()
    assert repair(done.path, tmp_path / "s", workers=0).exit_code == 0


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("images/9.png", r"images/9\.png: has no mask in .*masks"),
        ("masks/9.png", r"masks/9\.png: is the mask of an image that is not in .*images"),
        ("masks/1.bmp", r"masks/1\.png: differs from 1\.bmp only in its extension"),
        ("images/1.bmp", r"images/1\.png: differs from 1\.bmp only in its extension; remove one of them$"),
        ("images/sub/1.png", r"images/sub/1\.png: has no mask in .*masks; add it, or remove this image$"),
    ],
)
def test_a_missing_or_surplus_partner_is_named(more: str, match: str, tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        write_pictures(tmp_path / "s" / folder, NAMES)
    write(tmp_path / "s" / more, picture(9))

    with pytest.raises(DataError, match=match):
        convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        (["images/notes.txt", "masks/.DS_Store", "masks/README"], {"non-image files": 2, ".DS_Store": 1}),
        (["lost.png", "other.jpg", "notes.txt"], {"images beside the folders": 2}),
    ],
)
def test_what_is_left_out_is_counted(more: list[str], ignored: dict[str, int], tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        write_pictures(tmp_path / "s" / folder, NAMES)
        write(tmp_path / "s" / folder / "without-extension", picture(7))
    for name in (*more, "unlabeled/more/1.jpg"):
        write(tmp_path / "s" / name, b"x")

    (done,) = convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)

    assert done.ignored == ignored
    assert done.notes == ("folders with images that are left out: unlabeled",)
    assert done.manifest.records == len(NAMES) + 1


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("masks/val/1.png", r"masks: has val, for which .*images has no images"),
        (
            "images/holdout/1.png",
            r"images/holdout: has images, but is not a split; rename it to train, val or test",
        ),
    ],
)
def test_no_split_is_lost(more: str, match: str, tmp_path: Path) -> None:
    for folder in ("images/training", "masks/train"):
        write_pictures(tmp_path / "s" / folder, NAMES)
    (done,) = convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)
    assert (done.path.name, done.manifest.records) == ("train", 5)
    write(tmp_path / "s" / more, picture(1))

    with pytest.raises(ShardprepError, match=match):
        convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)


def test_partners_of_another_size_are_said(tmp_path: Path) -> None:
    write_pictures(tmp_path / "s/images", NAMES)
    write_pictures(tmp_path / "s/masks", [NAMES[1], NAMES[0], *NAMES[2:]], grey=True)
    words = ("convert", tmp_path / "s", tmp_path / "out", "--pair", "mask=masks", "--workers", 0, "--quiet")

    done = prep_here(*words, "--shard-size", 300, "--order", "key")

    assert "2 images in the column mask with a size other than" in done.stderr
    assert "(first: 0.png)" in done.stderr


def test_each_image_may_be_as_large_as_an_image_may_be(tmp_path: Path) -> None:
    large = picture(1) + bytes(MAX_IMAGE_BYTES - len(picture(1)))  # bytes after the end of a PNG
    for folder in ("images", "masks"):
        write(tmp_path / "s" / folder / "1.png", large)
    (done,) = convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)
    with open_dataset(done.path) as opened:
        assert opened[0].image == opened[0]["mask"] == large

    with (tmp_path / "s/masks/1.png").open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        DataError, match=r"masks/1\.png: has 67108865 bytes, but an image has at most"
    ) as found:
        convert(tmp_path / "s", tmp_path / "other", workers=0, source_options=MASKS)
    assert "images/1.png" not in str(found.value)


def test_a_partner_that_is_no_image_is_named(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        write_pictures(tmp_path / "s" / folder, NAMES)
    write(tmp_path / "s/masks/3.png", b"no image")

    with pytest.raises(DataError, match=r"masks/3\.png: ") as found:
        convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)

    assert found.value.key == "3.png"


def test_a_partner_that_changed_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        write_pictures(tmp_path / "s" / folder, NAMES)
    listing = recognise(tmp_path / "s", options=MASKS).listing("train")
    write(tmp_path / "s/masks/3.png", picture(4, grey=True))

    with listing.reader as reader, pytest.raises(DataError, match=r"masks/3\.png: changed"):
        [reader.values(entry) for entry in listing.entries]


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        ("mask=nowhere", "is not a folder, nor is"),
        ("mask=images", "holds the images themselves"),
        ("mask=masks/../images", "holds the images themselves"),
        ("mask=same", "holds the images themselves"),
        ("mask", "expected NAME=FOLDER"),
        ("mask:text=masks", "expected NAME=FOLDER"),
        ("key=masks", "reserved"),
    ],
)
def test_a_pair_that_is_none_is_refused(pair: str, match: str, tmp_path: Path) -> None:
    write_pictures(tmp_path / "s/images", NAMES)
    write_pictures(tmp_path / "s/masks", NAMES)
    (tmp_path / "s/same").symlink_to("images")

    with pytest.raises(UsageError, match=match):
        convert(
            tmp_path / "s",
            tmp_path / "out",
            workers=0,
            source_options=SourceOptions(pairs=(pair,), follow_symlinks=True),
        )


def test_pairs_of_a_source_that_has_none_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "list.txt", b"a.png cat\n")
    write_pictures(tmp_path / "s/images", NAMES)
    write_pictures(tmp_path / "s/masks", NAMES)
    write(tmp_path / "s/metadata.csv", b"file_name\n")

    with pytest.raises(UsageError, match=r"--pair: not for image-list: .* prep join"):
        recognise(tmp_path / "list.txt", options=MASKS)
    with pytest.raises(UsageError, match=r"several kinds: .*prep join"):
        recognise(tmp_path / "s", options=MASKS)
