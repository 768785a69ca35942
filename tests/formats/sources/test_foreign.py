"""Any exception of a reader over an untrusted file names the file; absurd sizes are refused first."""

import dataclasses
import gzip
import struct
from pathlib import Path

import pytest
from test_boxes import WNID, box_object, xml

from shardprep.formats.errors import BadImage, SourceDamaged
from shardprep.formats.images import kinds as jpeg
from shardprep.formats.images.header import READERS, read_image_header
from shardprep.formats.records.labels import MAX_WORDS
from shardprep.formats.sources.annotations import read_boxes
from shardprep.formats.sources.devkit import (
    MAX_DIMENSIONS,
    MAX_FIELDS,
    MAX_VALUES,
    read_devkit,
    read_struct_array,
)
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.sample import DOUBLE, INT8, INT32, MATRIX, STRUCT, UINT32, meta_mat
from support.source_builders import DEVKIT, Miniature, tar_of, write

MINI = Miniature()


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


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


@pytest.mark.parametrize(
    "changes", [{"words": "w" * (MAX_WORDS + 1)}, {"train_images": float("inf")}, {"train_images": 2.0**70}]
)
def test_a_class_that_cannot_be_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    synsets = MINI.synsets()
    synsets[0] = dataclasses.replace(synsets[0], **changes)  # type: ignore[arg-type]
    (tmp_path / DEVKIT).write_bytes(gzip.compress(MINI.devkit_tar(meta=meta_mat(synsets))))

    with pytest.raises(SourceDamaged, match=r"longer than|whole number"):
        read_devkit(tmp_path / DEVKIT)


def test_words_that_are_too_long_for_a_manifest_are_refused(tmp_path: Path) -> None:
    MINI.write_kaggle(tmp_path)
    write(tmp_path / "LOC_synset_mapping.txt", f"{WNID} {'w' * (MAX_WORDS + 1)}\n".encode())

    with pytest.raises(SourceDamaged, match="more than 1000 characters"):
        recognise(tmp_path).listing("val")


BOX = box_object(WNID, 1, 1, 9, 9)
HOSTILE_XMLS = {
    "unknown encoding": b'<?xml version="1.0" encoding="klingon"?>' + xml(BOX),
    "no encoding of text": b'<?xml version="1.0" encoding="hex"?>' + xml(BOX),
    "encoding of many bytes": b'<?xml version="1.0" encoding="utf-7"?>' + xml(BOX),
    "encoding that fails": b'<?xml version="1.0" encoding="idna"?>' + xml(BOX),
    "class of many characters": xml(box_object("n" * 100_000, 1, 1, 9, 9)),
    "number of many digits": xml(BOX, width="9" * 100_000),
    "no number": xml(BOX, width="0x10"),
}


@pytest.mark.parametrize("data", HOSTILE_XMLS.values(), ids=HOSTILE_XMLS)
def test_an_annotation_that_cannot_be_read_is_named(data: bytes, tmp_path: Path) -> None:
    archive = tmp_path / "ILSVRC2012_bbox_val_v3.tar"
    archive.write_bytes(tar_of({"val/ILSVRC2012_val_00000001.xml": data}))

    with pytest.raises(SourceDamaged, match=r"val_00000001\.xml: .*copy it again, or remove it") as caught:
        list(read_boxes(archive))
    assert caught.value.__cause__ is not None


def test_bytes_that_trip_the_reader_of_images_are_a_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def trip(image: bytes) -> None:
        raise struct.error("short")

    monkeypatch.setitem(READERS, (jpeg.JPEG_SIGNATURE,), trip)
    with pytest.raises(BadImage, match=r"cannot be read \(error: short\)") as caught:
        read_image_header(b"\xff\xd8\xff")
    assert isinstance(caught.value.__cause__, struct.error)
