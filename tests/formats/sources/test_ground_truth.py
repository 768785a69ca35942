from pathlib import Path

import numpy as np
import pytest

from shardprep.formats.errors import LabelConflict, SourceDamaged
from shardprep.formats.records.labels import MAX_WORDS, LabelSpace, official_words
from shardprep.formats.sources.annotations import (
    FIRST_VAL,
    caffe_authority,
    check_entries,
    devkit_authority,
    kaggle_authority,
)
from shardprep.formats.sources.devkit import Devkit
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import Entries, entry_dtype
from support.source_builders import Miniature, write

MINI = Miniature()
SPACE = LabelSpace.of(MINI.wnids)
OFFICIAL = LabelSpace.of(official_words())
HEAD = b"ImageId,PredictionString\n"


def test_an_image_of_another_name_has_no_label(tmp_path: Path) -> None:
    MINI.write_tree(tmp_path)
    MINI.write_devkit(tmp_path)
    write(tmp_path / "val/holiday.JPEG", b"x")
    with pytest.raises(LabelConflict, match="holiday: the devkit says nothing"):
        recognise(tmp_path).listing("val")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "does not begin with"),
        (b"Id,Label\n", "does not begin with"),
        (HEAD + b"a\n", "names no class"),
        (HEAD + b"a,\n", "names no class"),
        (HEAD + b"a,n01440764 1,2\n", "names no class"),
        (HEAD + b"a,n01440764\na,n01440764\n", "twice"),
        (HEAD + b"a,n01440764\n\xff", "not UTF-8 text at byte 37"),
        (HEAD + b"a," + b"n" * 200_000, "no CSV file"),
    ],
)
def test_a_damaged_solution_is_an_error(text: bytes, message: str, tmp_path: Path) -> None:
    write(tmp_path / "x.csv", text)
    with pytest.raises(SourceDamaged, match=message):
        kaggle_authority(tmp_path / "x.csv", SPACE)


def test_a_solution_of_other_classes_is_a_conflict(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", HEAD + b"ILSVRC2012_val_00000001,n01443537 1 2 3 4\n")
    with pytest.raises(LabelConflict, match="says n01443537, which is not one of the classes"):
        kaggle_authority(tmp_path / "x.csv", SPACE)


@pytest.mark.parametrize(
    "line", [b"ILSVRC2012_val_00000001.JPEG", b"ILSVRC2012_val_00000001.JPEG -1", b"a 1", b""]
)
def test_a_damaged_list_of_caffe_is_an_error(line: bytes, tmp_path: Path) -> None:
    write(tmp_path / "val.txt", b"ILSVRC2012_val_00000002.JPEG 1\n" + line + b"\n")
    with pytest.raises(SourceDamaged, match="is not an image and its label"):
        caffe_authority(tmp_path / "val.txt", SPACE)


def test_a_label_beyond_the_classes_is_a_conflict(tmp_path: Path) -> None:
    write(tmp_path / "val.txt", b"ILSVRC2012_val_00000002.JPEG 3\n")
    with pytest.raises(LabelConflict, match="says 3, but there are 3 classes"):
        caffe_authority(tmp_path / "val.txt", SPACE)


def official_devkit(first: int) -> Devkit:
    """Real classes, and ids of which only one is real: 490 is label 65."""
    ids = {wnid: i for i, wnid in enumerate(official_words(), start=1)}
    sea_snake, stand_in = OFFICIAL.classes[65].name, OFFICIAL.classes[489].name
    ids[sea_snake], ids[stand_in] = ids[stand_in], ids[sea_snake]
    truth = (first, *[1] * 49_999)
    return Devkit(LabelSpace.of(ids, ids=ids), dict.fromkeys(ids, 1), truth)


def test_the_official_devkit_says_490_of_the_first_image() -> None:
    kit = official_devkit(490)
    assert devkit_authority(kit, kit.classes).labels[FIRST_VAL] == 65
    wrong = official_devkit(65)
    with pytest.raises(LabelConflict, match="the devkit says 65, but its id is 490"):
        devkit_authority(wrong, wrong.classes)


def val_entries(count: int, label: int) -> Entries:
    entries = np.zeros(count, entry_dtype(23, 1))
    entries["key"] = [b"ILSVRC2012_val_%08d" % i for i in range(count, 0, -1)]
    entries["label"] = label
    return entries


@pytest.mark.parametrize("label", [66, 490, 970])
def test_official_images_with_labels_of_another_space_are_a_conflict(label: int) -> None:
    with pytest.raises(LabelConflict, match=f"says {label}, but in sorted_wnid0 it is 65"):
        check_entries(val_entries(50_000, label), OFFICIAL)


def test_words_that_are_too_long_for_a_manifest_are_refused(tmp_path: Path) -> None:
    MINI.write_kaggle(tmp_path)
    write(tmp_path / "LOC_synset_mapping.txt", b"n01440764 " + b"w" * (MAX_WORDS + 1) + b"\n")

    with pytest.raises(SourceDamaged, match="more than 1000 characters"):
        recognise(tmp_path).listing("val")
