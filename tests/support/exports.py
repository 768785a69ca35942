"""Reading exports with the libraries that they are for."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pytest

from shardprep.formats import open_dataset


class Read(NamedTuple):
    """What a reader finds of a record; ``boxes`` are lists of x_min, y_min, x_max, y_max."""

    key: str
    label: int
    image: bytes
    boxes: list[list[float]]


def expected(dataset: Path) -> list[Read]:
    with open_dataset(dataset) as opened:
        boxes: list[list[list[float]]] = [[] for _ in range(len(opened))]
        for box in () if opened.boxes is None else opened.boxes:
            boxes[box["record"]].append([float(box[s]) for s in ("x_min", "y_min", "x_max", "y_max")])
        return [Read(r.key, r.label, r.image, found) for r, found in zip(opened, boxes, strict=True)]


def files(folder: Path, pattern: str) -> list[str]:
    return sorted(map(str, folder.glob(pattern)))


def webdataset_samples(folder: Path) -> list[dict[str, Any]]:
    """The samples as webdataset reads them, not decoded."""
    tariterators = pytest.importorskip("webdataset.tariterators")
    samples = []
    for path in files(folder, "*.tar"):
        with Path(path).open("rb") as stream:  # webdataset itself leaves it open
            parts = tariterators.tar_file_expander([{"url": path, "stream": stream}])
            samples += list(tariterators.group_by_keys(parts))
    return samples


def from_webdataset(folder: Path) -> Iterator[Read]:
    for sample in webdataset_samples(folder):
        (image,) = [v for k, v in sample.items() if not k.startswith("__") and k not in ("cls", "boxes.json")]
        boxes = json.loads(sample.get("boxes.json", b'{"bbox":[]}'))["bbox"]
        yield Read(unquote(sample["__key__"]), int(sample.get("cls", b"-1")), image, boxes)


def tfrecord_features(folder: Path) -> Iterator[Any]:
    """The features of each record, as TensorFlow reads them."""
    tf = pytest.importorskip("tensorflow")
    for message in tf.data.TFRecordDataset(files(folder, "*-of-*")).as_numpy_iterator():
        yield tf.train.Example.FromString(message).features.feature


def from_tfrecord(folder: Path) -> Iterator[Read]:
    for features in tfrecord_features(folder):
        labels = features["image/class/label"].int64_list.value
        sides = [
            features[f"image/object/bbox/{s}"].float_list.value for s in ("xmin", "ymin", "xmax", "ymax")
        ]
        key, image = (features[name].bytes_list.value[0] for name in ("image/filename", "image/encoded"))
        yield Read(
            key.decode(),
            labels[0] - 1 if labels else -1,
            image,
            [list(box) for box in zip(*sides, strict=True)],
        )


def from_parquet(folder: Path) -> Iterator[Read]:
    pq = pytest.importorskip("pyarrow.parquet")
    for path in files(folder, "*.parquet"):
        for row in pq.read_table(path).to_pylist():
            boxes = row.get("objects", {"bbox": []})["bbox"]
            yield Read(row["image"]["path"], row["label"], row["image"]["bytes"], boxes)


def mds_samples(folder: Path) -> Iterator[dict[str, tuple[str, bytes]]]:
    """The encoding and bytes of each column of each sample, by the documented layout of MDS."""
    for shard in json.loads((folder / "index.json").read_bytes())["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        count = int.from_bytes(data[:4], "little")
        assert count == shard["samples"]
        for first, last in pairwise(np.frombuffer(data, "<u4", count + 1, 4).tolist()):
            yield mds_sample(shard, data[first:last])


def mds_sample(shard: dict[str, Any], sample: bytes) -> dict[str, tuple[str, bytes]]:
    at = 4 * shard["column_sizes"].count(None)
    sizes = iter(np.frombuffer(sample, "<u4", at // 4).tolist())
    found = {}
    for name, encoding, size in zip(
        shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True
    ):
        length = next(sizes) if size is None else size
        found[name] = (encoding, sample[at : at + length])
        at += length
    assert at == len(sample)
    return found


def mds_array(data: bytes, dtype: str) -> np.ndarray:
    """An array after its shape, as the encoding ndarray with a dtype has it."""
    dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
    shape = np.frombuffer(data, f"<u{width}", dimensions, 1)
    return np.frombuffer(data, dtype, offset=1 + dimensions * width).reshape(shape)


def from_mds(folder: Path) -> Iterator[Read]:
    for sample in mds_samples(folder):
        boxes = mds_array(sample["boxes"][1], "<f4").tolist() if "boxes" in sample else []
        label = int.from_bytes(sample["label"][1], "little", signed=True)
        yield Read(sample["key"][1].decode(), label, sample["image"][1], boxes)


def from_folders(folder: Path) -> Iterator[Read]:
    """The images by a walk, with the labels that ImageFolder would give; in the order of the metadata."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    lines = (
        (folder / "metadata.jsonl").read_text().splitlines() if (folder / "metadata.jsonl").exists() else []
    )
    known = {line["file_name"]: line for line in map(json.loads, lines)}
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".json", ".jsonl")]
    for path in sorted(found):
        name = str(path.relative_to(folder))
        label = classes.index(path.relative_to(folder).parts[0]) if "/" in name else -1
        line = known.get(name, {"key": unquote(name), "label": label, "objects": {"bbox": []}})
        assert line["label"] == label
        yield Read(line["key"], label, path.read_bytes(), line["objects"]["bbox"])


READERS: dict[str, Callable[[Path], Iterator[Read]]] = {
    "webdataset": from_webdataset,
    "tfrecord": from_tfrecord,
    "mds": from_mds,
    "parquet": from_parquet,
    "croissant": from_parquet,
    "folders": from_folders,
}
