import gzip
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import LabelSpace
from shardprep.formats.sources import devkit as boxes_module
from shardprep.formats.sources.devkit import MAX_XML_BYTES, parse_box_xml, read_boxes
from shardprep.formats.sources.recognise import recognise
from support.source_builders import tar_of, write

WNID = "n01440764"
SPACE = LabelSpace.of([WNID])


def box_object(name: str, x_min: object, y_min: object, x_max: object, y_max: object) -> str:
    ends = {"xmin": x_min, "ymin": y_min, "xmax": x_max, "ymax": y_max}
    inside = "".join(f"<{end}>{value}</{end}>" for end, value in ends.items())
    return f"<object><name>{name}</name><bndbox>{inside}</bndbox></object>"


def xml(*objects: str, width: object = 100, height: object = 50) -> bytes:
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>%s</filename>{size}{''.join(objects)}</annotation>".encode()


BOX = box_object(WNID, 1, 1, 9, 9)
ENCODINGS = (b"klingon", b"hex", b"utf-7", b"idna")  # unknown, of no text, of many bytes, and one that fails
ends = st.floats(-500, 500)


@pytest.mark.slow
@given(ends, ends, ends, ends, st.floats(1, 400), st.floats(1, 400))
def test_every_box_lies_in_the_image_and_has_area(
    a: float, b: float, c: float, d: float, width: float, height: float
) -> None:
    data = xml(box_object(WNID, a, b, c, d), width=width, height=height)
    for _, x_min, y_min, x_max, y_max in parse_box_xml(data, f"{WNID}/{WNID}_1"):
        assert 0 <= x_min < x_max <= 1
        assert 0 <= y_min < y_max <= 1


def test_a_name_that_is_no_wnid_is_the_images_class_or_the_wnid_of_a_known_one() -> None:
    data = xml(*(box_object(name, 1, 1, 9, 9) for name in ("dog", "Scottish_deerhound", WNID)))
    assert [name for name, *_ in parse_box_xml(data, f"{WNID}/{WNID}_1")] == [WNID] * 3
    assert [name for name, *_ in parse_box_xml(data, "ILSVRC2012_val_1")] == ["dog", "n02092002", WNID]


def written(folder: Path, files: dict[str, bytes], packed: bool) -> Path:
    """Write annotations into the folder, or into a tar."""
    if packed:
        write(folder / "a.tar", tar_of(files))
        return folder / "a.tar"
    for name, data in files.items():
        write(folder / name, data)
    return folder


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<annotation>",
        xml(box_object(WNID, 1, 2, 3, 4))[:-5],
        xml(box_object(WNID, "one", 2, 3, 4)),
        xml(box_object(WNID, "nan", 2, 3, 4)),
        xml(box_object(WNID, "1e999", 2, 3, 4)),
        xml(box_object(WNID, 1, 2, 3, 4), width=0),
        xml(box_object(WNID, 1, 2, 3, 4), height=-1),
        b"<annotation><size><width>9</width></size></annotation>",
        b"<a>" * 100_000,
        b'<!DOCTYPE a [<!ENTITY x "y">]><annotation>&x;</annotation>',
        '<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>'.encode("utf-16"),
        b"<annotation>&undeclared;</annotation>",
        *(b'<?xml version="1.0" encoding="%b"?>' % name + xml(BOX) for name in ENCODINGS),
        xml(BOX, width="9" * 100_000),
        xml(BOX, width="0x10"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_or_hostile_xml_is_an_error_that_names_it(data: bytes, packed: bool, tmp_path: Path) -> None:
    with pytest.raises(SourceDamaged, match=f"{WNID}_1.xml: .*copy it again, or remove it") as caught:
        read_boxes(written(tmp_path, {f"{WNID}_1.xml": data}, packed), SPACE)
    assert caught.value.__cause__ is not None
    twice = dict.fromkeys((f"a/{WNID}_7.xml", f"b/{WNID}_7.xml"), xml(box_object(WNID, 0, 0, 9, 9)))
    with pytest.raises(SourceDamaged, match=f"{WNID}/{WNID}_7: two XML files annotate this image"):
        read_boxes(written(tmp_path / "twice", twice, packed), SPACE)


@pytest.mark.parametrize("place", ["Annotations/train", "ILSVRC/Annotations/CLS-LOC/train", "my_bbox_train"])
def test_annotations_of_another_dataset_are_left_alone_and_official_ones_read(
    place: str, tmp_path: Path
) -> None:
    write(tmp_path / "train/cat/holiday.jpg", b"x")
    write(tmp_path / place / "cat/holiday.xml", b"not even XML")
    assert recognise(tmp_path).boxes("train", SPACE) is None

    (tmp_path / place / "cat/holiday.xml").unlink()
    write(tmp_path / place / f"{WNID}/{WNID}_1.xml", xml(BOX))
    assert len(recognise(tmp_path).boxes("train", SPACE) or ()) == 1


def test_what_is_no_annotation_no_gzip_or_a_bomb_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "other/holiday.xml", xml())
    with pytest.raises(SourceDamaged, match=r"holiday\.xml: it is not named after an image"):
        read_boxes(tmp_path / "other", SPACE)
    huge = bytes(MAX_XML_BYTES + 1)
    write(tmp_path / "folder" / f"{WNID}_1.xml", huge)
    write(tmp_path / "a.tar.gz", gzip.compress(tar_of({f"{WNID}_1.xml": huge})))
    for path in (tmp_path / "folder", tmp_path / "a.tar.gz"):
        with pytest.raises(SourceDamaged, match=r"1048576|1048577"):
            read_boxes(path, SPACE)
    write(tmp_path / "a.tgz", b"no gzip")
    with pytest.raises(SourceDamaged, match=r"cannot be inflated \(Not a gzipped file"):
        read_boxes(tmp_path / "a.tgz", SPACE)
    monkeypatch.setattr(boxes_module, "MAX_BOXES_BYTES", 1 << 20)
    write(tmp_path / "a.tgz", gzip.compress(tar_of({f"{WNID}_7.xml": xml(BOX)}) + bytes(4 << 20)))
    with pytest.raises(SourceDamaged, match="inflates to more than 1048576"):
        read_boxes(tmp_path / "a.tgz", SPACE)
