import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources import annotations as boxes_module
from shardprep.formats.sources.annotations import (
    MAX_XML_BYTES,
    BoxedObject,
    find_boxes,
    parse_box_xml,
    read_boxes,
)
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import Box
from shardprep.formats.sources.trees import FoundFile, files_below
from support.source_builders import Miniature, header, tar_of, write

WNID = "n01440764"


def box_object(name: str, x_min: object, y_min: object, x_max: object, y_max: object) -> str:
    ends = {"xmin": x_min, "ymin": y_min, "xmax": x_max, "ymax": y_max}
    inside = "".join(f"<{end}>{value}</{end}>" for end, value in ends.items())
    return f"<object><name>{name}</name><bndbox>{inside}</bndbox></object>"


def xml(*objects: str, width: object = 100, height: object = 50) -> bytes:
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>%s</filename>{size}{''.join(objects)}</annotation>".encode()


def parsed(*objects: str, own_class: str | None = WNID, **size: object) -> list[BoxedObject]:
    return list(parse_box_xml(xml(*objects, **size), own_class))


@pytest.mark.parametrize(
    ("corners", "expected"),
    [
        ((10, 5, 50, 50), (0.1, 0.1, 0.5, 1.0)),
        ((50, 50, 10, 5), (0.1, 0.1, 0.5, 1.0)),
        ((-20, -1, 120, 60), (0.0, 0.0, 1.0, 1.0)),
        (("10.5", "5e0", 50.25, 25), (0.105, 0.1, 0.5025, 0.5)),
    ],
)
def test_a_box_is_in_fractions_of_the_displayed_size(
    corners: tuple[object, ...], expected: tuple[float, ...]
) -> None:
    ((name, *box),) = parsed(box_object(WNID, *corners))
    assert name == WNID
    assert box == pytest.approx(expected)


@pytest.mark.parametrize("corners", [(110, 5, 150, 40), (-9, 5, 0, 40), (10, 60, 20, 70), (10, 5, 10, 40)])
def test_a_box_without_area_in_the_image_is_left_out(corners: tuple[object, ...]) -> None:
    assert parsed(box_object(WNID, *corners)) == []


ends = st.floats(-500, 500)


@pytest.mark.slow
@given(ends, ends, ends, ends, st.floats(1, 400), st.floats(1, 400))
def test_every_box_lies_in_the_image_and_has_area(
    a: float, b: float, c: float, d: float, width: float, height: float
) -> None:
    for box in parsed(box_object(WNID, a, b, c, d), width=width, height=height):
        assert 0 <= box.x_min < box.x_max <= 1
        assert 0 <= box.y_min < box.y_max <= 1


@pytest.mark.parametrize(
    ("name", "own_class", "expected"),
    [
        ("n02100735", WNID, "n02100735"),
        ("Scottish_deerhound", WNID, WNID),
        ("Scottish_deerhound", None, "n02092002"),
        ("", WNID, WNID),
        ("thing", None, "thing"),
    ],
)
def test_a_name_that_is_no_wnid_gives_way_to_the_images_own_class(
    name: str, own_class: str | None, expected: str
) -> None:
    assert [box.name for box in parsed(box_object(name, 0, 0, 9, 9), own_class=own_class)] == [expected]


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
    ],
)
def test_a_damaged_or_hostile_xml_is_an_error_that_names_it(data: bytes, tmp_path: Path) -> None:
    write(tmp_path / f"{WNID}_1.xml", data)
    with pytest.raises(SourceDamaged, match=f"{WNID}_1.xml"):
        list(read_boxes(tmp_path))


def annotations() -> dict[str, bytes]:
    second = box_object("n02100735", 0, 0, 100, 50)
    return {
        "n02100735/n02100735_3.xml": xml(box_object("n02100735", 0, 0, 50, 50)),
        f"{WNID}/{WNID}_7.xml": xml(box_object(WNID, 0, 0, 10, 50), second),
        f"{WNID}/{WNID}_10026.xml": xml(box_object(WNID, 200, 0, 300, 50)),
    }


EXPECTED = [
    Box(f"{WNID}/{WNID}_7", WNID, 0.0, 0.0, 0.1, 1.0),
    Box(f"{WNID}/{WNID}_7", "n02100735", 0.0, 0.0, 1.0, 1.0),
    Box("n02100735/n02100735_3", "n02100735", 0.0, 0.0, 0.5, 1.0),
]


@pytest.mark.parametrize(
    "place",
    [
        "ILSVRC/Annotations/CLS-LOC/train",
        "Annotations/CLS-LOC/train",
        "Annotations/train",
        "bbox_train_v2",
        "ILSVRC2012_bbox_train_v2",
        "ILSVRC2012_bbox_train_v2.tar.gz",
        "ILSVRC2012_bbox_train_v2.tgz",
        "ILSVRC2012_bbox_train_v2.tar",
    ],
)
def test_boxes_are_found_and_come_ordered_by_key(place: str, tmp_path: Path) -> None:
    if place.endswith((".gz", ".tgz", ".tar")):
        tar = tar_of({f"bbox/train/{name}": data for name, data in annotations().items()} | {"readme": b"x"})
        write(tmp_path / place, tar if place.endswith(".tar") else gzip.compress(tar))
    else:
        for name, data in annotations().items():
            write(tmp_path / place / name, data)
    write(tmp_path / "ILSVRC2012_bbox_train_dogs.tar.gz", b"other boxes")
    found = find_boxes([tmp_path], "train")
    assert found == tmp_path / place
    assert list(read_boxes(found)) == EXPECTED
    assert find_boxes([tmp_path], "val") is None


def test_a_source_gives_the_boxes_that_lie_beside_it(tmp_path: Path) -> None:
    source = recognise(Miniature().write_kaggle(tmp_path))
    assert source.boxes("val") is None
    write(
        tmp_path / "ILSVRC/Annotations/CLS-LOC/val/ILSVRC2012_val_00000001.xml",
        xml(box_object(WNID, 0, 0, 9, 9)),
    )
    assert [box.key for box in source.boxes("val") or ()] == ["ILSVRC2012_val_00000001"]
    assert source.boxes("test") is None


@pytest.mark.parametrize("place", ["Annotations/train", "ILSVRC/Annotations/CLS-LOC/train", "my_bbox_train"])
def test_annotations_of_another_dataset_are_left_alone(place: str, tmp_path: Path) -> None:
    write(tmp_path / "train/cat/holiday.jpg", b"x")
    write(tmp_path / place / "cat/holiday.xml", b"not even XML")
    assert recognise(tmp_path).boxes("train") is None


@pytest.mark.parametrize("packed", [False, True])
def test_two_annotations_of_one_image_are_an_error_that_names_it(packed: bool, tmp_path: Path) -> None:
    once = xml(box_object(WNID, 0, 0, 9, 9))
    files = {f"{folder}/{WNID}_7.xml": once for folder in ("a", "b")}
    for name, data in files.items():
        write(tmp_path / "folder" / name, data)
    write(tmp_path / "a.tar", tar_of(files))
    with pytest.raises(SourceDamaged, match=f"{WNID}/{WNID}_7: two XML files annotate this image"):
        list(read_boxes(tmp_path / ("a.tar" if packed else "folder")))


def test_a_folder_on_the_way_to_the_annotations_may_not_be_a_link(tmp_path: Path) -> None:
    write(tmp_path / "moved/train" / f"{WNID}_7.xml", xml())
    (tmp_path / "Annotations").symlink_to(tmp_path / "moved")
    with pytest.raises(SourceDamaged, match="Annotations: is a symbolic link"):
        find_boxes([tmp_path], "train")


@pytest.mark.parametrize("name", ["n01440764", "n01440764/n01440764_1.xml"])
def test_annotations_swapped_for_a_link_once_they_were_listed_are_not_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "boxes"
    write(place / "n01440764/n01440764_1.xml", xml())

    def files(top: Path) -> Iterator[FoundFile]:
        found = list(files_below(top))
        (place / name).rename(tmp_path / "moved")
        (place / name).symlink_to(tmp_path / "moved")
        return iter(found)

    monkeypatch.setattr(boxes_module, "files_below", files)

    with pytest.raises(SourceDamaged, match=f"{name}: is a symbolic link"):
        list(read_boxes(place))


def test_an_annotation_of_no_official_image_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "holiday.xml", xml())
    with pytest.raises(SourceDamaged, match=r"holiday\.xml: it is not named after an image"):
        list(read_boxes(tmp_path))


def test_an_annotation_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    huge = bytes(MAX_XML_BYTES + 1)
    write(tmp_path / "folder" / f"{WNID}_1.xml", huge)
    write(tmp_path / "a.tar.gz", gzip.compress(tar_of({f"{WNID}_1.xml": huge})))
    for path in (tmp_path / "folder", tmp_path / "a.tar.gz"):
        with pytest.raises(SourceDamaged, match=r"1048576|1048577"):
            list(read_boxes(path))


def test_a_damaged_archive_of_boxes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    tar = tar_of(annotations())
    flipped = bytes([*tar[:3], tar[3] ^ 1, *tar[4:]])
    for damaged in (
        flipped,
        tar[:1024],
        header("a", 1 << 40),
        header(f"{WNID}_1.xml", 0, b"2") + bytes(1024),
    ):
        write(path, gzip.compress(damaged))
        with pytest.raises(SourceDamaged):
            list(read_boxes(path))


def test_a_gzip_bomb_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes_module, "MAX_BOXES_BYTES", 1 << 20)
    write(tmp_path / "a.tgz", gzip.compress(tar_of(annotations()) + bytes(4 << 20)))
    with pytest.raises(SourceDamaged, match="inflates to more than 1048576"):
        list(read_boxes(tmp_path / "a.tgz"))
