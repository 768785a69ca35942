"""The images and labels of records: under usual names, or where the user says; never missed silently."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import SourceOptions, convert, open_dataset, repair
from shardprep.formats.shards.manifest import read_manifest
from support.datasets import prep_here, tree, writable
from support.record_sources import IMAGES, write_shard, write_tfrecord
from support.tensorpack_files import save_datapoints

ROWS = range(6)
Write = Callable[[Path, Sequence[Mapping[str, Any]]], Path]


def as_bytes(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def tfrecord(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    return write_tfrecord(
        path / "train.tfrecord", [{name: as_bytes(value) for name, value in row.items()} for row in rows]
    )


def webdataset(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    parts = [
        {name: as_bytes(str(value) if isinstance(value, int) else value) for name, value in row.items()}
        for row in rows
    ]
    return write_shard(path / "train.tar", {f"{number:03}": part for number, part in enumerate(parts)})


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.mkdir()
    pq.write_table(pa.Table.from_pylist(list(rows)), path / "train.parquet")
    return path / "train.parquet"


def tensorpack(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.mkdir()
    return save_datapoints(path / "train.lmdb", rows)


SOURCES = [tfrecord, webdataset, parquet, tensorpack]


def rows_of(image: str, label: str, labels: Sequence[Any] = ROWS) -> list[dict[str, Any]]:
    return [{image: IMAGES[n], label: labels[n], "more": 10 + n} for n in ROWS]


def found_in(dataset: Path) -> dict[int, tuple[bytes, str]]:
    """The images, and the names of their classes."""
    with open_dataset(dataset) as opened:
        names = [each.name for each in opened.manifest.labels.classes]
        return {
            int(record["more"]): (record.image, names[record.label] if record.label >= 0 else "")
            for record in opened
        }


@pytest.mark.parametrize("write", SOURCES)
@pytest.mark.parametrize(("image", "label"), [("image_raw", "class"), ("jpg", "label"), ("img", "cls")])
def test_the_usual_names_are_taken(write: Write, image: str, label: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", rows_of(image, label))

    done = prep_here("convert", source, tmp_path / "out", "--workers", 0, "--quiet")

    assert f"{tmp_path}/out/train: 6 images, 6 classes, " in done.stdout
    assert found_in(tmp_path / "out/train") == {10 + n: (IMAGES[n], f"{n:05d}") for n in ROWS}


@pytest.mark.parametrize("write", SOURCES)
def test_other_names_are_given_and_labels_may_be_text(write: Write, tmp_path: Path) -> None:
    species = ["cat", "ant", "cat", "bee", "ant", "cat"]
    source = write(tmp_path / "source", rows_of("rgb.view", "class", species))
    words = ["convert", source, tmp_path / "out", "--workers", 0, "--quiet"]
    names = ["--image-column", "rgb.view", "--label-column", "class"]

    note = "no record has a label; if it is class, add --label-column class"
    assert note in prep_here(*words, "--dry-run").stdout
    assert note not in prep_here(*words, "--label-column", "", "--dry-run").stdout
    assert "6 images, 3 classes" in prep_here(*words, *names, "--dry-run").stdout
    done = prep_here(*words, *names)
    assert "6 images, 3 classes" in done.stdout
    assert "note" not in done.stderr
    assert found_in(tmp_path / "out/train") == {10 + n: (IMAGES[n], species[n]) for n in ROWS}
    before = tree(tmp_path / "out")
    next((tmp_path / "out/train").glob("shard-*")).unlink()
    repair(tmp_path / "out/train", source, workers=0)
    assert tree(tmp_path / "out") == before
    assert "--image-column was rgb.view, is now off" in prep_here(*words).stderr


@pytest.mark.parametrize("write", SOURCES)
def test_what_records_lack_is_said_first_and_a_name_that_none_has_is_an_error(
    write: Write, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", rows_of("rgb", "species", "abcdef"))
    words = [source, tmp_path / "out", "--workers", 0, "--quiet"]

    for option in ("--image-column", "--label-column"):
        done = prep_here("convert", *words, option, "picture")
        assert done.returncode == 2
        said = f"train{source.suffix}: no record has a column 'picture'; name it with {option}, one of: "
        assert re.search(re.escape(said) + ".*rgb", done.stderr)
    planned, done = prep_here("convert", *words, "--dry-run"), prep_here("convert", *words)
    inspected = prep_here("inspect", tmp_path / "out/train")
    for said_by in (planned, done, inspected):
        assert "6 records without images or labels" in said_by.stdout.splitlines()[0]
    (split,) = json.loads(prep_here("convert", *words, "--json").stdout)["splits"]
    assert (split["has_images"], split["has_labels"]) == (False, False)


@pytest.mark.parametrize("write", SOURCES)
def test_chosen_columns_alone_are_converted_whatever_the_others_hold(write: Write, tmp_path: Path) -> None:
    left = b"\xff" if write is webdataset else [b"\xff", b"\0"]
    rows = [row | {"left": left} for row in rows_of("jpg", "cls")]
    if write is webdataset:
        del rows[2]["left"]  # a part that a sample lacks
    source = write(tmp_path / "source", rows)
    words = ["convert", source, tmp_path / "out", "--workers", 0, "--quiet", "--column"]

    assert "no record has a column 'no'" in prep_here(*words, "no").stderr
    for wrong in ("more:label", "more=left"):
        assert "the column more keeps its name and its kind" in prep_here(*words, wrong).stderr
    assert prep_here(*words, "more").returncode == 0
    assert found_in(tmp_path / "out/train") == {10 + n: (IMAGES[n], f"{n:05d}") for n in ROWS}
    before = tree(tmp_path / "out")
    next((tmp_path / "out/train").glob("shard-*")).unlink()
    repair(tmp_path / "out/train", source, workers=0)
    assert tree(tmp_path / "out") == before
    assert read_manifest(tmp_path / "out/train").schema.names == ("more",)


@pytest.mark.parametrize("write", SOURCES)
def test_bytes_that_are_no_image_and_a_column_named_as_a_label_would_be_keep_their_values(
    write: Write, tmp_path: Path
) -> None:
    rows = [{"label_": f"text {n}", "image_raw": bytes([n]) * 12, "label": n} for n in ROWS]

    (done,) = convert(write(tmp_path / "source", rows), tmp_path / "out", workers=0)

    assert not done.manifest.has_images
    with open_dataset(tmp_path / "out/train") as dataset:
        found = {record.label: (as_bytes(record["label_"]), record["image_raw"]) for record in dataset}
    assert found == {n: (b"text %d" % n, bytes([n]) * 12) for n in ROWS}


@pytest.mark.parametrize("write", SOURCES)
def test_what_an_earlier_release_took_for_columns_is_repaired_as_these(write: Write, tmp_path: Path) -> None:
    source = write(tmp_path / "source", rows_of("image_raw", "class"))
    options = SourceOptions(image_column="", label_column="")
    (done,) = convert(source, tmp_path / "out", split="train", source_options=options, workers=0)
    kept = {
        name: value
        for name, value in done.manifest.source.items()
        if name not in ("image_column", "label_column")
    }
    writable(tmp_path / "out/manifest.json").write_bytes(replace(done.manifest, source=kept).to_bytes())
    (tmp_path / "out/shard-00000.lmdb").unlink()

    repair(tmp_path / "out", source, workers=0).raise_for_findings()

    assert read_manifest(tmp_path / "out").schema.names[0].startswith(("class", "image_raw"))


def test_a_tensorpack_list_has_its_components_by_number(tmp_path: Path) -> None:
    source = save_datapoints(tmp_path / "train.lmdb", [[n, IMAGES[n], "ab"[n % 2]] for n in ROWS])
    options = SourceOptions(image_column="1", label_column="2")

    convert(source, tmp_path / "out", split="train", source_options=options, workers=0)

    with open_dataset(tmp_path / "out") as dataset:
        assert {record["0"]: (record.image, record.label) for record in dataset} == {
            n: (IMAGES[n], n % 2) for n in ROWS
        }


def test_text_for_labels_is_the_same_in_all_splits(tmp_path: Path) -> None:
    for split, labels in {"train": "bdb", "val": "ca"}.items():
        rows = [{"image": IMAGES[n], "species": label.encode()} for n, label in enumerate(labels)]
        write_tfrecord(tmp_path / f"source/{split}.tfrecord", rows)
    options = SourceOptions(label_column="species")

    for done in convert(tmp_path / "source", tmp_path / "out", source_options=options, workers=0):
        assert [each.name for each in done.manifest.labels.classes] == ["a", "b", "c", "d"]
    with open_dataset(tmp_path / "out/val") as dataset:
        assert sorted(record.label for record in dataset) == [0, 2]
