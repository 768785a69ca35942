"""TFRecord files: what TensorFlow wrote comes out, and a hostile file is only an error."""

import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import BadImage, SourceDamaged, SourceIncomplete, SourceOptions, UsageError, convert
from shardprep.formats.records.record import UNLABELLED
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.tfrecord import decode_integers, masked_crc
from support.datasets import converted, flip
from support.image_files import JPEG
from support.memory import memory_below
from support.record_sources import (
    IMAGES,
    Feature,
    example,
    frame,
    message,
    official,
    records,
    tfds,
    varint,
    write_tfrecord,
)


def test_a_missing_file_of_a_series_is_told_and_one_too_many_is_read(tmp_path: Path) -> None:
    imagenet = tmp_path / "imagenet"
    write_tfrecord(imagenet / "train-00001-of-00002", [official(2, 5)])
    write_tfrecord(imagenet / "validation-00000-of-00001", [official(3, 0)])

    has_less = r"train has \d+ images? \(it lacks 1 of 2 files, the first is train-00000-of-00002"
    for source, options in ((imagenet, {}), (imagenet / "train-00001-of-00002", {"val_fraction": 0.5})):
        with pytest.raises(SourceIncomplete, match=has_less):
            convert(source, tmp_path / "out", source_options=SourceOptions(**options), workers=0)
    write_tfrecord(imagenet / "validation-00001-of-00001", [official(4, 0)])
    assert len(recognise(imagenet).listing("val").entries) == 2


@pytest.mark.parametrize("name", [b"same.jpg", b"", b"\xff.jpg", b"x" * 1500])
def test_without_names_of_their_own_records_are_numbered(name: bytes, tmp_path: Path) -> None:
    rows = [{"image": JPEG, "label": 0, "file_name": each} for each in (name, b"same.jpg")]
    for number in range(2):
        write_tfrecord(tmp_path / f"train/{number}.tfrecord", rows)
    (tmp_path / "train/1.parquet").touch()  # img2dataset writes one beside each
    assert sorted(recognise(tmp_path).listing("train").entries["key"].tolist()) == [
        f"train/{file}.tfrecord/{row:08d}".encode() for file in range(2) for row in range(2)
    ]


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"image": JPEG, "more": 2}, "lacks the feature 'label', which the first record has"),
    "a label of bytes": ({"image": JPEG, "label": b"1"},
                         "its label is '1', not an integer from -1 to 99999; --label-column label takes"),
    "two labels": ({"image": JPEG, "label": [1, 2]}, "it has no label, or several"),
    "a huge label": ({"image": JPEG, "label": 1 << 40}, "labels are 0 to 99999"),
    "no image": ({"label": 1}, "no image, or several, in the feature 'image'"),
    "two images": ({"image": [JPEG, JPEG], "label": 1}, "no image, or several"),
    "an image of floats": ({"image": [0.5], "label": 1}, "no image, or several"),
    "another kind": ({"image": JPEG, "label": 1, "more": 0.5}, "'more' has floats, but integers in other records"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "message"), ODD.values(), ids=ODD)
def test_an_odd_record_is_named_with_its_place(row: dict[str, Feature], message: str, tmp_path: Path) -> None:
    first = {"image": JPEG, "label": 1, "more": 1}
    path = write_tfrecord(tmp_path / "a.tfrecord", [first, row])
    start = len(frame(example(first)))

    with pytest.raises(SourceDamaged, match=rf"a\.tfrecord, byte {start}: .*{message}.*write the file again"):
        recognise(path).listing("train")
    assert recognise(path).survey("train").schema.kinds == {"more": "int"}


def test_files_of_no_records_and_labels_that_are_none_of_the_official_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(SourceDamaged, match="is compressed"):
        recognise(tmp_path).listing("train")
    rows = [official(0, 5), official(1, 5) | {"image/class/label": 0}]
    write_tfrecord(tmp_path / "a.tfrecord", [rows[0], rows[1] | {"image/class/synset": b""}])  # background
    assert recognise(tmp_path).listing("train").entries["label"].tolist() == [5, UNLABELLED]
    write_tfrecord(tmp_path / "a.tfrecord", rows)
    with pytest.raises(SourceDamaged, match="label is 0, but labels beside image/class/synset begin with 1"):
        recognise(tmp_path).listing("train")
    (tmp_path / "a.tfrecord").rename(tmp_path / "model-00000-of-00001").write_bytes(bytes(range(100)))
    tarfile.open(tmp_path / "empty.tar", "w", pax_headers={"comment": "no member"}).close()
    for none in (tmp_path, tmp_path / "empty.tar"):
        with pytest.raises(UsageError, match=r"is not a (known source|tar of)"):
            recognise(none)


def test_each_checksum_is_checked_and_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", map(tfds, range(3)))
    second = len(frame(example(tfds(0))))
    data = example(tfds(1))
    listing = recognise(path).listing("train")
    with listing.reader.open() as reader:
        assert reader.read(listing.entries[1]) == IMAGES[1]

    for at, message_ in (
        (0, "length is wrong"), (9, "length is wrong"), (12 + data.index(IMAGES[1]) + 50, "data is wrong")
    ):  # fmt: skip
        flip(path, second + at)
        with pytest.raises(SourceDamaged, match=rf"byte {second}: .*checksum of a record's {message_}"):
            records(recognise(path).listing("train"))
        flip(path, second + at)
    flip(path, second + 12 + len(data))
    with pytest.raises(SourceDamaged, match="data is wrong"):
        records(recognise(path).listing("train"))

    whole = path.read_bytes()
    for end in (second + 3, second + 12, second + 100, second + len(frame(data)) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(SourceDamaged, match=rf"byte {second}: the file is truncated within"):
            recognise(path).listing("train")


def absurd(length: int) -> bytes:
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc(head)) + bytes(50)


HOSTILE = {
    "a length of all bits": absurd((1 << 64) - 1),
    "a length of a terabyte": absurd(1 << 40),
    "a value of a terabyte": frame(b"\x0a" + varint(1 << 40)),
    "an endless number": frame(b"\xff" * 100),
    "a group": frame(b"\x0b" + bytes(9)),
    "field 0": frame(b"\x02\x00"),
    "a name of a megabyte": frame(message(1, message(1, message(1, b"n" * (1 << 20))))),
    "many features": frame(example({str(n): 1 for n in range(300)})),
    "a feature twice": frame(message(1, 2 * message(1, message(1, b"a") + message(2, b"")))),
    "a list of two kinds": frame(message(1, message(1, message(2, message(1, b"") + message(2, b""))))),
    "another message": frame(message(2, b"x")),
    "a number for a feature": frame(message(1, b"\x10\x01")),
    "empty messages without end": frame(b"\x0a\x00" * 1_000_000),
    "a name again and again": frame(message(1, message(1, message(1, b"a") * 300_000))),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_records_are_refused_without_much_memory(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(data)
    source = recognise(tmp_path)

    with memory_below(8 << 20), pytest.raises(SourceDamaged, match=r"a\.tfrecord, byte 0"):
        source.listing("train")


def test_a_list_of_more_numbers_than_a_value_may_have_is_refused_by_their_count(tmp_path: Path) -> None:
    packed = message(3, message(1, b"\1" * 20_000_000))
    (tmp_path / "a.tfrecord").write_bytes(
        frame(message(1, message(1, message(1, b"ids") + message(2, packed))))
    )
    listing = recognise(tmp_path).listing("train")

    with (
        memory_below(200 << 20),  # a gigabyte as numbers
        listing.reader.open() as reader,
        pytest.raises(SourceDamaged, match="20,000,000 numbers; a value has at most"),
    ):
        reader.values(listing.entries[0])


def test_lists_have_one_kind_in_all_splits_and_tfds_names_the_classes(tmp_path: Path) -> None:
    rows = [tfds(0, ids=[1, 2], tags=[b"x"], more=[]), tfds(1, ids=[3], tags=[], more=[0.5])]
    (tmp_path / "label.labels.txt").write_text("ant\nbee\ncat\n")
    write_tfrecord(tmp_path / "train.record", rows)
    write_tfrecord(tmp_path / "val.record", [tfds(2, ids=[4], tags=[b"y"], more=[2.5])])

    listings = [recognise(tmp_path).listing(split) for split in ("train", "val")]
    found = [row for each in listings for row in records(each).values()]

    assert [each.name for each in listings[0].labels.classes] == ["ant", "bee", "cat"]
    values = [(row["ids"].tolist(), row["tags"], row["more"].tolist()) for row in found]
    assert values == [([1, 2], ["x"], []), ([3], [], [0.5]), ([4], ["y"], [2.5])]
    for data in (b"\1\xff", b"\xff" * 9 + b"\2"):
        with pytest.raises(ValueError, match="a list of numbers is truncated, or one has more than 64 bits"):
            decode_integers(data)


def test_a_list_of_bytes_that_are_no_text_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    tags = ([b"a", b"b"], [b"a", b"\xff"])
    path = write_tfrecord(tmp_path / "a.tfrecord", [tfds(n, tags=two) for n, two in enumerate(tags)])

    with pytest.raises(BadImage, match=r"the column tags: is not UTF-8 .*--column.*;.* --on-bad-image skip"):
        converted(path, tmp_path / "out")
    assert converted(path, tmp_path / "out", on_bad_image="skip").skipped == 1


@pytest.mark.parametrize("names", [["a" * 60], ["a.b", "a/b"]])
def test_features_that_make_no_columns_are_named_with_the_files(names: list[str], tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", [dict.fromkeys(names, 1)])

    with pytest.raises(UsageError, match=rf"{tmp_path}: .*(occurs twice|has 1 to 40 letters)"):
        recognise(path).listing("train")


@pytest.mark.slow
def test_what_tensorflow_writes_is_read(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")

    name, rows = "train-00000-of-00001", [official(n, 3 * n, boxes=n % 3) for n in range(9)]
    ours = write_tfrecord(tmp_path / "ours" / name, rows)
    with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
        for raw in tf.data.TFRecordDataset(str(ours)):
            writer.write(tf.train.Example.FromString(raw.numpy()).SerializeToString())

    source, same = recognise(tmp_path / name), recognise(ours)
    listings = [each.listing("train") for each in (source, same)]
    assert records(listings[0]) == records(listings[1])
    boxes, others = (each.boxes("train", listings[0].labels) for each in (source, same))
    assert boxes is not None
    assert len(boxes)
    np.testing.assert_array_equal(boxes, others)
