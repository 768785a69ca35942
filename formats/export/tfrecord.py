"""TFRecord: files of ``tf.train.Example`` with the keys of the official ImageNet scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.schema import Field

from .example_message import Feature, bytes_feature, example, float_feature, framed, int_feature
from .export_format import ShardFormat
from .export_record import SIDES, ExportRecord

COLORSPACES = {1: b"Grayscale", 2: b"Grayscale", 3: b"RGB"}
SIDE_KEYS = {side: "image/object/bbox/" + side.replace("_", "") for side in SIDES}
SPLITS = {"val": "validation"}  # as the official scripts call it
FLOATS = ("float16", "float32")
RAW = ("float64", "uint64", "complex64", "complex128")
"""Elements of arrays that no feature holds: their little-endian bytes are exported, for tf.io.decode_raw."""


class TFRecord(ShardFormat):
    """Files of records with images, labels from 1 on, boxes and columns.

    Features without a value are left out: of records without label, ``image/class/…``.
    """

    name = "tfrecord"

    def unit_name(self, number: int, count: int) -> str:
        split = SPLITS.get(self.source.split, self.source.split)
        return f"{split}-{number:05d}-of-{count:05d}"

    def bytes_beside(self) -> int:
        return 1024 + 128 * len(self.source.schema)

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        for record in records:
            file.write(framed(example(dict(self._features(record)))))

    def _features(self, record: ExportRecord) -> Iterator[tuple[str, Feature]]:
        yield "image/filename", bytes_feature(record.key.encode())
        if self.source.has_images:
            yield from _image_features(record)
        if record.label >= 0:
            named = self.source.labels.classes[record.label]
            yield "image/class/label", int_feature([record.label + 1])
            yield "image/class/synset", bytes_feature(named.name.encode())
            if named.words is not None:
                yield "image/class/text", bytes_feature(named.words.encode())
        if record.boxes is not None:
            for side, name in SIDE_KEYS.items():
                yield name, float_feature(record.boxes[side].tolist())
            yield "image/object/bbox/label", int_feature((record.boxes["label"] + 1).tolist())
        for field in self.source.schema:
            yield from _column_features(field, record.columns[field.name])


def _image_features(record: ExportRecord) -> Iterator[tuple[str, Feature]]:
    row = record.row
    channels = int(row["components"])
    yield "image/encoded", bytes_feature(record.image)
    yield "image/format", bytes_feature(record.kind.upper().encode())
    yield "image/height", int_feature([int(row["height"])])
    yield "image/width", int_feature([int(row["width"])])
    yield "image/channels", int_feature([channels])
    yield "image/colorspace", bytes_feature(_colorspace(record.kind, channels))


def _colorspace(kind: str, channels: int) -> bytes:
    return COLORSPACES.get(channels, b"CMYK" if kind == "JPEG" else b"RGB")


def _column_features(field: Field, value: Any) -> Iterator[tuple[str, Feature]]:
    """Yield the features of a column, with the column's name; the shape of an array is ``NAME/shape``."""
    match field.kind:
        case "bytes" | "image":
            yield field.name, bytes_feature(value)
        case "text":
            yield field.name, bytes_feature(value.encode())
        case "json":
            yield field.name, bytes_feature(json.dumps(value, ensure_ascii=False).encode())
        case "int" | "label":
            yield field.name, int_feature([value])
        case "float":
            yield field.name, float_feature([value])
        case "labels":
            yield field.name, int_feature(value.tolist())
        case _:
            array = np.asarray(value)
            yield field.name, _array_feature(array)
            yield f"{field.name}/shape", int_feature(array.shape)


def _array_feature(array: npt.NDArray[Any]) -> Feature:
    if array.dtype.name in RAW:
        return bytes_feature(array.tobytes())
    if array.dtype.name in FLOATS:
        return float_feature(array.ravel().tolist())
    return int_feature(array.ravel().tolist())
