"""TFRecord: files of ``tf.train.Example`` with the keys of the official ImageNet scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from shardprep.formats.exports.format import ExportFormat, ExportRecord
from shardprep.formats.records.record import ImageClass
from shardprep.formats.records.schema import Field
from shardprep.formats.shards.columns import SIDES
from shardprep.formats.sources.tfrecord import HEAD, TAIL, masked_crc

Feature = bytes
"""An encoded ``tf.train.Feature``."""

# Protocol buffer keys: a field's number, and the wire type of a length.
_FIRST, _SECOND, _THIRD = (number << 3 | 2 for number in (1, 2, 3))


def varint(number: int) -> bytes:
    """Encode an unsigned number of up to 64 bits: seven bits per byte, the lowest first."""
    data = bytearray()
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _field(key: int, data: bytes) -> bytes:
    return bytes([key]) + varint(len(data)) + data


def bytes_feature(*values: bytes) -> Feature:
    return _field(_FIRST, b"".join(_field(_FIRST, value) for value in values))


def float_feature(values: Iterable[float]) -> Feature:
    """Return a feature of floats, rounded to 32 bits."""
    with np.errstate(over="ignore"):
        return _field(_SECOND, _field(_FIRST, np.asarray([*values], "<f4").tobytes()))


def int_feature(values: Iterable[int]) -> Feature:
    return _field(_THIRD, _field(_FIRST, b"".join(varint(value & 0xFFFF_FFFF_FFFF_FFFF) for value in values)))


def encode_example(features: Mapping[str, Feature]) -> bytes:
    """Return the ``tf.train.Example`` of these features, sorted by name."""
    entries = (_field(_FIRST, name.encode()) + _field(_SECOND, features[name]) for name in sorted(features))
    return _field(_FIRST, b"".join(_field(_FIRST, entry) for entry in entries))


COLORSPACES = {1: b"Grayscale", 2: b"Grayscale", 3: b"RGB"}
SIDE_KEYS = {side: "image/object/bbox/" + side.replace("_", "") for side in SIDES}
FLOAT_DTYPES = ("float16", "float32")
RAW_DTYPES = ("float64", "uint64", "complex64", "complex128")
"""Elements of arrays that no feature can hold; exported as little-endian bytes, for tf.io.decode_raw."""


class TFRecord(ExportFormat):
    """Files of records with images, labels from 1 on, boxes and columns.

    A record without a label has 0 and no synset, as the official scripts' background, if there are classes.
    """

    name = "tfrecord"
    unit_names = "{split}-{number:05d}-of-{count:05d}"
    overhead = 64  # the length, checksums and key; records with images have more

    def unit_name(self, number: int, count: int) -> str:
        name = super().unit_name(number, count)
        is_val = self.source.split == "val"
        return name.replace("val-", "validation-", 1) if is_val else name  # the official name

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        for record in records:
            message = encode_example(dict(self._features(record)))
            length = len(message).to_bytes(8, "little")
            file.write(HEAD.pack(len(message), masked_crc(length)) + message + TAIL.pack(masked_crc(message)))

    def _features(self, record: ExportRecord) -> Iterator[tuple[str, Feature]]:
        yield "image/filename", bytes_feature(record.key.encode())
        if self.source.has_images:
            channels = int(record.row["components"])
            space = COLORSPACES.get(channels, b"CMYK" if record.kind == "JPEG" else b"RGB")
            yield "image/encoded", bytes_feature(record.image)
            yield "image/format", bytes_feature(record.kind.upper().encode())
            yield "image/height", int_feature([int(record.row["height"])])
            yield "image/width", int_feature([int(record.row["width"])])
            yield "image/channels", int_feature([channels])
            yield "image/colorspace", bytes_feature(space)
        if classes := self.source.labels.classes:
            named = classes[record.label] if record.label >= 0 else ImageClass("")
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


def _column_features(field: Field, value: Any) -> Iterator[tuple[str, Feature]]:
    """Yield a column's feature, under its name; an array also has its shape, ``NAME/shape``."""
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
            if array.dtype.name in RAW_DTYPES:
                yield field.name, bytes_feature(array.tobytes())
            else:
                feature = float_feature if array.dtype.name in FLOAT_DTYPES else int_feature
                yield field.name, feature(array.ravel().tolist())
            yield f"{field.name}/shape", int_feature(array.shape)
