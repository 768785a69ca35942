"""The layouts of sources: each member writes any content as its files."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest

from shardprep.formats import write_dataset
from support.column_sources import as_csv, as_json_lines
from support.image_files import encoded, pixels
from support.record_sources import write_shard, write_tfrecord
from support.source_builders import TRAIN, Miniature, tar_of, write
from support.tensorpack_files import save_datapoints

WNIDS = ["n90000001", "n90000002", "n90000003"]  # none of the official ones, of which there are more


class Sample(NamedTuple):
    """An image: its stem, its class, its bytes, and a text beside it."""

    stem: str
    wnid: str
    image: bytes
    text: str


Content = list[Sample]


@dataclass(frozen=True)
class Member:
    """A layout: ``write`` makes its files in a folder, in the order given, and returns the path to convert.

    ``convert`` is that path below the folder, ``text`` the column of the texts, if they have one;
    ``has_names`` says that classes have their names.
    """

    write: Callable[[Path, Content], Path]
    text: str = ""
    has_names: bool = True
    convert: str = ""


def class_folders(folder: Path, content: Content) -> Path:
    for sample in content:
        write(folder / "train" / sample.wnid / f"{sample.stem}.png", sample.image)
    return folder


def flat(folder: Path, content: Content) -> list[dict[str, Any]]:
    """Write all images into one folder; return a row for each."""
    for sample in content:
        write(folder / f"{sample.stem}.png", sample.image)
    return [{"file_name": f"{s.stem}.png", "label": s.wnid, "text": s.text} for s in content]


def labelled_list(folder: Path, content: Content) -> Path:
    rows = [
        {"path": f"images/{row['file_name']}", "label": row["label"]}
        for row in flat(folder / "images", content)
    ]
    write(folder / "train.csv", as_csv(rows).encode())
    return folder / "train.csv"


def metadata_csv(folder: Path, content: Content) -> Path:
    write(folder / "train" / "metadata.csv", as_csv(flat(folder / "train", content)).encode())
    return folder


def metadata_jsonl(folder: Path, content: Content) -> Path:
    write(folder / "train" / "metadata.jsonl", as_json_lines(flat(folder / "train", content)).encode())
    return folder


def coco(folder: Path, content: Content) -> Path:
    rows = flat(folder / "train2017", content)
    images = [{"id": n, "file_name": row["file_name"], "width": 9, "height": 6} for n, row in enumerate(rows)]
    wanted = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "thing"}]}
    write(folder / "annotations" / "instances_train2017.json", json.dumps(wanted).encode())
    return folder


def official_tar(folder: Path, content: Content) -> Path:
    classes = {
        f"{wnid}.tar": tar_of(
            {f"{wnid}_{crc32(s.stem.encode())}.JPEG": s.image for s in content if s.wnid == wnid}
        )
        for wnid in dict.fromkeys(s.wnid for s in content)
    }
    write(folder / TRAIN, tar_of(classes))
    counts = {wnid: tuple(n for n, s in enumerate(content) if s.wnid == wnid) for wnid in WNIDS}
    Miniature(tuple(WNIDS), counts).write_devkit(folder)
    return folder


def webdataset(folder: Path, content: Content) -> Path:
    parts = {
        s.stem: {"png": s.image, "cls": b"%d" % WNIDS.index(s.wnid), "txt": s.text.encode()} for s in content
    }
    write_shard(folder / "train-000000.tar", parts)
    return folder


def tfrecord(folder: Path, content: Content) -> Path:
    rows = [
        {
            "image": s.image,
            "label": WNIDS.index(s.wnid),
            "file_name": f"{s.stem}.png".encode(),
            "text": s.text.encode(),
        }
        for s in content
    ]
    write_tfrecord(folder / "train-00000-of-00001", rows)
    return folder


def parquet(folder: Path, content: Content) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {
            "image": [{"bytes": s.image, "path": f"{s.stem}.png"} for s in content],
            "label": [WNIDS.index(s.wnid) for s in content],
            "text": [s.text for s in content],
        }
    )
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=2)
    return folder


def tensorpack(folder: Path, content: Content) -> Path:
    folder.mkdir(parents=True)
    return save_datapoints(folder / "train.lmdb", [[s.image, WNIDS.index(s.wnid)] for s in content])


def saved(folder: Path, content: Content) -> Path:
    records = [{"key": s.stem, "image": s.image, "label": s.wnid, "text": s.text} for s in content]
    write_dataset(records, folder, classes=WNIDS, workers=0)
    return folder


MEMBERS = {
    "class folders": Member(class_folders),
    "labelled list": Member(labelled_list, convert="train.csv"),
    "metadata.csv": Member(metadata_csv, text="text"),
    "metadata.jsonl": Member(metadata_jsonl, text="text"),
    "COCO": Member(coco, has_names=False),
    "official tar": Member(official_tar),
    "WebDataset": Member(webdataset, text="txt", has_names=False),
    "TFRecord": Member(tfrecord, text="text", has_names=False),
    "Parquet": Member(parquet, text="text", has_names=False),
    "tensorpack": Member(tensorpack, has_names=False, convert="train.lmdb"),
    "converted": Member(saved, text="text"),
}

IMAGES = [encoded(pixels(6, 9, 3)[:, : 9 - n], ".png") for n in range(4)]
CONTENT = [Sample(f"s{n}", WNIDS[n % 3], IMAGES[n % 4], f"text {n}") for n in range(5)]
