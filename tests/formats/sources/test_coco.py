"""Images with COCO's instances."""

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from column_sources import coco_instances, picture, write_pictures
from hypothesis import given, settings
from hypothesis import strategies as st
from source_builders import write

from shardprep.formats import PlanOptions, SourceOptions, convert, open_dataset, repair
from shardprep.formats.errors import DataError, ShardprepError, UsageError
from shardprep.formats.sources.recognise import recognise

NAMES = [f"{number:012}.png" for number in range(5)]


def coco(folder: Path, instances: dict[str, Any] | None = None, name: str = "train2017") -> Path:
    """A folder as COCO is unpacked."""
    write_pictures(folder / name, NAMES)
    text = json.dumps(instances or coco_instances(NAMES), ensure_ascii=False)
    write(folder / f"annotations/instances_{name}.json", text.encode())
    return folder


def test_annotations_become_columns_of_their_images(tmp_path: Path) -> None:
    coco(coco(tmp_path / "s"), name="val2017")

    train, val = convert(
        tmp_path / "s", tmp_path / "out", workers=0, plan_options=PlanOptions(shard_size=600)
    )

    assert len(train.manifest.shards) > 1
    assert train.manifest.schema["objects"].classes == ("car", "brush")
    assert (
        train.manifest.content_root != val.manifest.content_root or train.manifest.split != val.manifest.split
    )
    with open_dataset(train.path) as opened:
        for record in opened:
            n = NAMES.index(record.key)
            assert (record.label, record.image) == (-1, picture(n))
            boxes = [[m / 10, 2 * m / 20, (m + 4) / 10, (2 * m + 5.5) / 20] for m in range(n)]
            np.testing.assert_array_equal(
                record["boxes"], np.array(boxes, np.float32).clip(0, 1).reshape(-1, 4)
            )
            assert record["box_labels"].tolist() == [(1, 0)[m % 2] for m in range(n)]
            assert record["crowd"].tolist() == [bool(m % 2) for m in range(n)]
            assert record["segmentation"] == [[[m, 1.5, "é"]] for m in range(n)]
            assert record["objects"].tolist() == sorted({(1, 0)[m % 2] for m in range(n)})


def test_the_file_of_instances_can_be_named_and_repair_finds_it(tmp_path: Path) -> None:
    folder = coco(tmp_path / "s")
    coco(tmp_path / "s", name="train2014")
    (folder / "annotations/instances_train2017.json").rename(folder / "mine.json")
    with pytest.raises(UsageError, match="is no file"):
        recognise(folder, options=SourceOptions(coco="yours.json"))

    (done,) = convert(
        folder / "train2017", tmp_path / "out", workers=0, source_options=SourceOptions(coco="../mine.json")
    )
    (done.path / "shard-00000.lmdb").unlink()

    assert done.manifest.source["coco"] == "../mine.json"
    assert repair(done.path, folder / "train2017", workers=0).exit_code == 0


def test_two_files_of_one_split_are_refused(tmp_path: Path) -> None:
    coco(coco(tmp_path / "s"), name="train2014")

    with pytest.raises(UsageError, match="second file of the split train; choose one with --coco"):
        recognise(tmp_path / "s")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["images"].pop(), r"000004\.png: is in no object of instances_train2017\.json"),
        (
            lambda d: d["images"].append({**d["images"][0], "id": 7, "file_name": "x.png"}),
            r"x\.png: is missing",
        ),
        (lambda d: d["images"].append({**d["images"][0], "file_name": NAMES[1]}), "record key|one id"),
        (lambda d: d["images"][0].update(file_name="../x"), r"without \.\."),
        (lambda d: d["images"][0].update(width=0), "no width and height"),
        (lambda d: d["annotations"][0].update(image_id=1), "of an image that is not there"),
        (lambda d: d["annotations"][0].update(category_id=1), "of a category that is not there"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, -3, 4]), "which is none"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, 3]), "no bbox of four numbers"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, 3, float("inf")]), "Infinity is not JSON"),
        (lambda d: d["annotations"].append(3), "expected an object"),
        (lambda d: d["categories"].append({"id": 3, "name": "x"}), "there twice"),
        (lambda d: d.update(categories=[]), "has no categories, or two"),
    ],
)
def test_instances_that_contradict_themselves_are_an_error(change: Any, match: str, tmp_path: Path) -> None:
    instances = coco_instances(NAMES)
    change(instances)

    with pytest.raises(ShardprepError, match=match) as found:
        convert(coco(tmp_path / "s", instances), tmp_path / "out", workers=0)

    assert found.value.exit_code == 1


@pytest.mark.parametrize("cut", [0, 1, 20, 500, 900, -1])
def test_a_file_that_ends_too_early_is_an_error(cut: int, tmp_path: Path) -> None:
    path = coco(tmp_path / "s") / "annotations/instances_train2017.json"
    data = path.read_bytes()
    path.unlink()
    write(path, data[:cut])

    with pytest.raises(DataError, match=r"train2017\.json: "):
        recognise(tmp_path / "s").listing("train")


def test_a_job_takes_the_annotations_of_its_images_alone(tmp_path: Path) -> None:
    listing = recognise(coco(tmp_path / "s")).listing("train")
    some = listing.entries[3:4]

    reader = pickle.loads(pickle.dumps(listing.reader.only(some)))  # noqa: S301 - of this test

    assert len(reader.places.offsets) == 3
    with reader, listing.reader as whole:
        assert reader.values(some[0]) == whole.values(some[0])


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60), cut=st.integers(0, 1200))
def test_any_bytes_are_instances_or_a_documented_error(
    data: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    whole = json.dumps(coco_instances(NAMES)).encode()
    write(folder / "annotations/instances_x.json", whole[:cut] + data + whole[cut + len(data) :])
    write_pictures(folder / "x", NAMES)
    with suppress(ShardprepError):
        listing = recognise(folder).listing("train")
        with listing.reader as reader:
            for entry in listing.entries:
                reader.values(entry)
