"""Images with partners in other folders, such as masks."""

from pathlib import Path

import pytest
from column_sources import picture, write_pictures
from source_builders import write

from shardprep.formats import SourceOptions, convert, open_dataset, repair
from shardprep.formats.errors import DataError, UsageError
from shardprep.formats.sources.recognise import recognise

NAMES = [f"{number}.png" for number in range(5)]
MASKS = SourceOptions(pairs=("mask=masks",))


@pytest.mark.parametrize(
    ("images", "masks", "splits"),
    [
        ("images", "masks", {"train"}),
        ("", "masks", {"train"}),
        ("images/{}", "masks/{}", {"train", "val"}),
        ("{}/images", "{}/masks", {"train", "val"}),
        ("{}", "{}/masks", {"train", "val"}),
        ("{}", "masks/{}", {"train", "val"}),
    ],
)
def test_every_image_has_its_partner(images: str, masks: str, splits: set[str], tmp_path: Path) -> None:
    for split in splits:
        write_pictures(tmp_path / "s" / images.format(split), [f"{n}.bmp" for n in range(5)])
        write_pictures(tmp_path / "s" / masks.format(split), NAMES, grey=True)

    done = convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)

    assert {one.manifest.split for one in done} == splits
    for one in done:
        with open_dataset(one.path) as opened:
            assert len(opened) == 5
            for record in opened:
                number = int(record.key[0])
                assert (record.label, record.image) == (-1, picture(number))
                assert record["mask"] == picture(number, grey=True)


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
        ("masks/9.png", r"masks/9\.png: is the mask of no image in .*images"),
        ("masks/1.bmp", r"masks/1\.png: differs from another file by its extension alone"),
        ("images/1.bmp", r"images/1\.png: has no mask"),
    ],
)
def test_a_missing_or_surplus_partner_is_named(more: str, match: str, tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        write_pictures(tmp_path / "s" / folder, NAMES)
    write(tmp_path / "s" / more, picture(9))

    with pytest.raises(DataError, match=match):
        convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=MASKS)


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
        ("mask=nowhere", "is no folder, and neither is"),
        ("mask=images", "holds the images themselves"),
        ("mask", "expected NAME=FOLDER"),
        ("mask:text=masks", "expected NAME=FOLDER"),
        ("key=masks", "reserved"),
    ],
)
def test_a_pair_that_is_none_is_refused(pair: str, match: str, tmp_path: Path) -> None:
    write_pictures(tmp_path / "s/images", NAMES)
    write_pictures(tmp_path / "s/masks", NAMES)

    with pytest.raises(UsageError, match=match):
        convert(tmp_path / "s", tmp_path / "out", workers=0, source_options=SourceOptions(pairs=(pair,)))


def test_pairs_of_a_source_that_has_none_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "list.txt", b"a.png cat\n")
    write_pictures(tmp_path / "s/images", NAMES)
    write_pictures(tmp_path / "s/masks", NAMES)
    write(tmp_path / "s/metadata.csv", b"file_name\n")

    with pytest.raises(UsageError, match="pairs are of images with columns"):
        recognise(tmp_path / "list.txt", options=MASKS)
    with pytest.raises(UsageError, match=r"several kinds: .*prep join"):
        recognise(tmp_path / "s", options=MASKS)
