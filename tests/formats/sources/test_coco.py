"""Images with COCO's instances, or with partners in other folders, such as masks."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import Converted, ConvertOptions, SourceOptions, convert, open_dataset, repair
from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.errors import BadImage, DataError, LabelConflict, ShardprepError, UsageError
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.sources.recognise import recognise
from support.column_sources import coco_instances, picture, write_pictures
from support.datasets import prep_here
from support.image_files import JPEG, chunk, png_head
from support.source_builders import write

NAMES = [f"{number:012}.png" for number in range(5)]


def coco(folder: Path, instances: dict[str, Any] | None = None, name: str = "train2017") -> Path:
    """A folder as COCO is unpacked."""
    write_pictures(folder / name, NAMES)
    write(folder / name / NAMES[0], JPEG)
    text = json.dumps(instances or coco_instances(NAMES), ensure_ascii=False)
    write(folder / f"annotations/instances_{name}.json", text.encode())
    return folder


def test_the_file_of_instances_can_be_named_and_repair_finds_it(tmp_path: Path) -> None:
    folder = coco(coco(tmp_path / "s"), name="train2014")
    with pytest.raises(UsageError, match="second file of the split train; choose one with --coco"):
        recognise(folder)
    (folder / "annotations/instances_train2017.json").rename(folder / "mine.json")
    with pytest.raises(UsageError, match="does not exist"):
        recognise(folder, options=SourceOptions(coco="yours.json"))
    mine = SourceOptions(coco="../mine.json")
    (done,) = convert(folder / "train2017", tmp_path / "out", workers=0, source_options=mine)
    (done.path / "shard-00000.lmdb").unlink()
    assert done.manifest.source["coco"] == "../mine.json"
    assert repair(done.path, folder / "train2017", workers=0).exit_code == 0
    (folder / "train2014" / NAMES[4]).rename(folder / "train2014/unlisted.png")
    write(folder / "train2014/metadata.csv", b"another,table\n1,2\n")
    persons = (folder / "annotations/instances_train2014.json").rename(folder / "persons_train2014.json").name
    named, some_of_them = SourceOptions(True, coco=persons), ConvertOptions(allow_partial=True)
    (some,) = convert(folder, tmp_path / "a", workers=0, options=some_of_them, source_options=named)
    with open_dataset(some.path) as opened:
        assert [len(record["boxes"]) for record in sorted(opened)] == [*range(4)]
    assert "1 file missing, first" in some.notes[-1]
    (folder / "train2014").rename(tmp_path / "moved")
    (folder / "train2014").symlink_to(tmp_path / "moved")
    (note,) = recognise(folder, options=named).survey("train").notes
    assert note == "folders with images that are left out: train2017"
    (folder / persons).rename(folder / "annotations/coco_annotations.json")
    (folder / "train2014").rename(folder / "images")
    others = SourceOptions(True, coco="annotations/coco_annotations.json")
    assert len(recognise(folder, options=others).survey("train").entries) == 4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["images"].pop(), r"4 images, not 5 \(1 file not in instances_train2017\.json, first \S+000004\.png\)"),
        (lambda d: d["images"].append({**d["images"][0], "id": 7, "file_name": "x.png"}),
         r"has 5 images, not 6 \(1 file missing, first \S+x\.png\); add --allow-partial"),
        (lambda d: d["images"].append({**d["images"][0], "file_name": NAMES[1]}), "record key(.|\\n)*same id"),
        (lambda d: d["images"][0].update(file_name="../x"), r"without \.\."),
        (lambda d: d["images"][0].update(width="10"), "no valid width and height; correct it, or copy it again$"),
        (lambda d: d["images"][0].update(width=0), "no valid width"),
        (lambda d: d["images"][0].update(width=5_000_000_000), "no valid width and height"),
        (lambda d: d["images"][0].update(width=6, height=9), "has 9x6 pixels, but annotations for 6x9, as if turned"),
        (lambda d: d["images"][0].pop("file_name"), "has no file_name"),
        (lambda d: d["annotations"][0].update(image_id="1"), "image_id of an object is not a whole number"),
        (lambda d: d["annotations"][0].update(image_id=1), "to an image that does not exist"),
        (lambda d: d["annotations"][0].update(category_id=1), "to a category that does not exist"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, -3, 4]), "no valid bbox"),
        (lambda d: d["annotations"][0].pop("bbox"), "has no bbox .*by --pair, .*to a list"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, 3]), "no valid bbox of four numbers"),
        (lambda d: d["annotations"][0].update(iscrowd="0"), "an iscrowd that is neither 0 nor 1"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, 3, float("inf")]), "Infinity is not JSON"),
        (lambda d: d["annotations"].append(3), "expected a JSON object"),
        (lambda d: d["categories"].append({"id": 3, "name": "x"}), "occurs twice"),
        (lambda d: d.update(categories=[]), "has no categories .*captions, .* or two"),
    ],
)  # fmt: skip
def test_instances_that_contradict_themselves_are_an_error(change: Any, match: str, tmp_path: Path) -> None:
    change(instances := coco_instances(NAMES))

    with pytest.raises(ShardprepError, match=match) as found:
        convert(coco(tmp_path / "s", instances), tmp_path / "out", workers=0)

    assert found.value.exit_code == 1


def test_a_dry_run_reports_an_unknown_category_once(tmp_path: Path) -> None:
    (instances := coco_instances(NAMES))["annotations"][0].update(category_id=1)
    done = prep_here("convert", coco(tmp_path / "s", instances), tmp_path / "out", "--dry-run")

    (problem,) = (line for line in done.stdout.splitlines() if line.startswith("problem: "))
    assert "refers to a category that does not exist" in problem


def test_splits_with_other_categories_are_a_conflict(tmp_path: Path) -> None:
    fewer = coco_instances(NAMES)
    fewer["categories"] = [one for one in fewer["categories"] if one["name"] == "car"]
    fewer["annotations"] = [one for one in fewer["annotations"] if one["category_id"] == 3]
    coco(coco(tmp_path / "s"), fewer, name="val2017")

    conflict = r"instances_val2017\.json: has different categories from instances_train2017"
    with pytest.raises(LabelConflict, match=conflict):
        convert(tmp_path / "s", tmp_path / "out", workers=0)


def test_instances_beside_the_images_are_recognised(tmp_path: Path) -> None:
    """As Roboflow exports them, with a category for all others, and a byte order mark."""
    for split in ("train", "valid", "test"):
        write_pictures(tmp_path / "s" / split, NAMES)
        instances = coco_instances(NAMES)
        instances["categories"].append({"id": 0, "name": "car", "supercategory": "none"})
        del instances["annotations"][0]["id"]  # it is not used
        write(tmp_path / "s" / split / "_annotations.coco.json", f"\ufeff{json.dumps(instances)}".encode())
    done = convert(tmp_path / "s", tmp_path / "out", workers=0)
    (alone,) = convert(tmp_path / "s/valid", tmp_path / "alone", split="val", workers=0)
    named_file = SourceOptions(coco="valid/_annotations.coco.json")
    (named,) = convert(tmp_path / "s", tmp_path / "named", split="val", workers=0, source_options=named_file)
    assert [one.manifest.split for one in done] == ["train", "val", "test"]
    assert done[0].manifest.schema["objects"].classes == ("car", "brush")
    assert len({one.manifest.content_root for one in (done[1], alone, named)}) == 1
    with open_dataset(done[1].path) as opened:
        assert {record.key: len(record["boxes"]) for record in opened} == {NAMES[n]: n for n in range(5)}

    (tmp_path / "s/test/_annotations.coco.json").unlink()
    with pytest.raises(UsageError, match=r"test: lacks _annotations\.coco\.json, which other splits have"):
        recognise(tmp_path / "s")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *(("minival2014", "val"), ("valminusminival", "val"), ("x_val", "val"), ("latest", "train")),
        *(("default", "train"), ("trainval", "train"), ("test-dev2017", "test"), ("train_test", None)),
    ],
)
def test_the_split_is_a_word_of_the_files_name(name: str, split: str | None, tmp_path: Path) -> None:
    coco(tmp_path / "s", name=name)

    if split:
        assert recognise(tmp_path / "s").splits == (split,)
    else:
        with pytest.raises(UsageError, match="named after test and train; choose it with --coco and --split"):
            recognise(tmp_path / "s")


@pytest.mark.parametrize("source", ["annotations/instances_train2017.json", "my labels.json", ""])
def test_a_file_of_instances_as_or_in_source_says_what_to_run(source: str, tmp_path: Path) -> None:
    write_pictures(tmp_path, names := [f"train2017/{name}" for name in NAMES])  # as in Label Studio
    text = json.dumps(coco_instances(names), indent=1).replace("/", "/" if source else r"\\")
    write(tmp_path / (source or "my labels.json"), text.encode())

    refused = prep_here("convert", tmp_path / source, tmp_path / "out")

    command = refused.stderr.partition("has COCO's annotations; give the folder of their images: prep ")[2]
    places = {"IMAGES": str(tmp_path / "train2017"), "OUTPUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in shlex.split(command)]
    assert (refused.returncode, prep_here(*words, "--workers", 0, "--quiet").returncode) == (2, 0)


PAIRED = [f"{number}.png" for number in range(5)]
MASKS = SourceOptions(pairs=("mask=masks",))


@pytest.fixture
def paired(tmp_path: Path) -> Path:
    """A folder with images and their masks."""
    for folder in ("images", "masks"):
        write_pictures(tmp_path / "s" / folder, PAIRED)
    return tmp_path / "s"


def with_masks(folder: Path) -> Converted:
    (done,) = convert(folder, folder.parent / "out", workers=0, source_options=MASKS)
    return done


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
    ("split", "more", "match"),
    [
        ("", "images/9.png", r"images/9\.png: has no mask in .*masks"),
        ("", "masks/9.png", r"masks/9\.png: is the mask of an image that is not in .*images"),
        ("", "masks/1.bmp", r"masks/1\.png: differs from 1\.bmp only in its extension"),
        ("", "images/1.bmp", r"images/1\.png: differs from 1\.bmp only in its extension; remove one of them$"),
        ("", "images/sub/1.png", r"images/sub/1\.png: has no mask in .*masks; add it, or remove this image$"),
        ("train", "masks/val/1.png", r"masks: has val, for which .*images has no images"),
    ],
)  # fmt: skip
def test_a_missing_or_surplus_partner_or_split_is_named(
    split: str, more: str, match: str, tmp_path: Path
) -> None:
    for folder in ("images", "masks"):
        write_pictures(tmp_path / "s" / folder / split, PAIRED)
    if split:
        done = with_masks(tmp_path / "s")
        assert (done.path.name, done.manifest.records) == ("train", 5)
    write(tmp_path / "s" / more, picture(9))
    with pytest.raises(ShardprepError, match=match):
        with_masks(tmp_path / "s")


def test_what_is_left_out_is_counted_or_noted(paired: Path) -> None:
    for folder in ("images", "masks"):
        write(paired / folder / "without-extension", picture(7))
    for name in ("images/notes.txt", "masks/.DS_Store", "masks/README", "unlabeled/more/1.jpg", "lost.png"):
        write(paired / name, b"x")
    done = with_masks(paired)
    assert done.ignored == {"non-image files": 2, ".DS_Store": 1}
    beside = f"images directly in {paired} are left out"
    assert done.notes == ("folders with images that are left out: unlabeled", beside)
    assert done.manifest.records == len(PAIRED) + 1
    for folder in ("images", "masks"):
        (paired / folder).rename(paired / "train")
        (paired / folder).mkdir()
        (paired / "train").rename(paired / folder / "train")
    write(paired / "images/holdout/1.png", picture(9))
    listing = recognise(paired, options=MASKS).listing("train")
    unlabeled, holdout = (f"folders with images that are left out: {n}" for n in ("unlabeled", "holdout"))
    assert listing.notes == (unlabeled, beside, holdout)


def test_partners_of_another_size_are_said(tmp_path: Path) -> None:
    write_pictures(tmp_path / "s/images", PAIRED)
    write_pictures(tmp_path / "s/masks", [PAIRED[1], PAIRED[0], *PAIRED[2:]], grey=True)
    words = ("convert", tmp_path / "s", tmp_path / "out", "--pair", "mask=masks", "--workers", 0, "--quiet")

    said = prep_here(*words, "--shard-size", 300, "--order", "key", "--shorter-side", 6).stderr

    assert "2 images in the column mask with a size other than the record's image (first: 0.png)" in said
    assert "--shorter-side shrinks only the images: masks, and positions in pixels, stay as they are" in said


def test_each_image_may_be_as_large_as_an_image_may_be(tmp_path: Path) -> None:
    large = picture(1) + bytes(MAX_IMAGE_BYTES - len(picture(1)))  # bytes after the end of a PNG
    for folder in ("images", "masks"):
        write(tmp_path / "s" / folder / "1.png", large)
    with open_dataset(with_masks(tmp_path / "s").path) as opened:
        assert opened[0].image == opened[0]["mask"] == large

    with (tmp_path / "s/masks/1.png").open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        DataError, match=r"masks/1\.png: has 67108865 bytes, but an image has at most"
    ) as found:
        convert(tmp_path / "s", tmp_path / "other", workers=0, source_options=MASKS)
    assert "images/1.png" not in str(found.value)


def test_a_partner_that_is_no_image_or_has_changed_since_it_was_listed_is_named(paired: Path) -> None:
    listing = recognise(paired, options=MASKS).listing("train")
    write(paired / "masks/3.png", b"no image")

    with listing.reader.open() as reader, pytest.raises(DataError, match=r"masks/3\.png: changed"):
        [reader.values(entry) for entry in listing.entries]
    with pytest.raises(DataError, match=r"masks/3\.png: ") as found:
        with_masks(paired)
    assert found.value.key == "3.png"
    write(paired / "masks/3.png", png_head(9, 6, 0) + chunk(b"IDAT") + chunk(b"IEND"))
    with pytest.raises(BadImage, match=r"images/3\.png: the column mask: does not decode"):
        convert(paired, f"{paired}-o", source_options=MASKS, plan_options=PlanOptions(decode_check=True))
