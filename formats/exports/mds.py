"""MDS, version 2: the shards of MosaicML Streaming, and their index.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.exports.format import (
    ExportFormat,
    ExportRecord,
    ExportSource,
    JobFolders,
    corners,
    publish_file,
    real_array,
)
from shardprep.formats.records.schema import ArrayCodec, Field
from shardprep.formats.shards.read import FileEntry, Rows

INDEX = "index.json"
MAX_BYTES = (1 << 32) - 1  # offsets have 32 bits
BOXES, BOX_LABELS = "boxes", "box_labels"
SUBSTITUTES = {"bool": "uint8", "complex64": "float32", "complex128": "float64"}
"""Substitutes for dtypes that MDS lacks; complex numbers get a last dimension of 2."""


class MdsColumn(NamedTuple):
    """A column of MDS: name, encoding, and the size of each value in bytes, None if it varies."""

    name: str
    encoding: str
    size: int | None = None


class MDS(ExportFormat):
    """Shards with the columns image, key, label, boxes and the dataset's own, and their index."""

    name = "mds"
    overhead = 16  # the offset, the label and the size of the key
    unit_names = "shard.{number:05d}.mds"
    box_names = BOXES, BOX_LABELS

    def __init__(self, source: ExportSource, index: Rows, report_done: Callable[[int], None]) -> None:
        super().__init__(source, index, report_done)
        columns = [MdsColumn("key", "str"), MdsColumn("label", "int", 8)]
        if source.has_images:
            columns.append(MdsColumn("image", "jpeg"))  # decoded by Pillow, which recognises any kind
        if source.has_boxes:
            columns += [MdsColumn(BOXES, "ndarray:float32"), MdsColumn(BOX_LABELS, "ndarray:int32")]
        self._columns = sorted([*columns, *map(_mds_column, source.schema)])  # by name, which is unique
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": ["sha256"],
            "size_limit": None,
            "column_names": [column.name for column in self._columns],
            "column_encodings": [column.encoding for column in self._columns],
            "column_sizes": [column.size for column in self._columns],
        }

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        """Write the samples after space for their offsets, then the offsets."""
        config = json.dumps(self._config, sort_keys=True).encode()
        offsets = [4 * (2 + count) + len(config)]
        file.write(bytes(4 * (2 + count)) + config)
        for record in records:
            sample = self._sample(record)
            file.write(sample)
            offsets.append(offsets[-1] + len(sample))
            if offsets[-1] > MAX_BYTES:
                raise UsageError("a shard of MDS has at most 4 GiB; choose a smaller --shard-size")
        file.seek(0)
        file.write(np.array([count, *offsets], "<u4").tobytes())

    def _sample(self, record: ExportRecord) -> bytes:
        values = {"key": record.key.encode(), "label": _encode_integer(record.label), "image": record.image}
        if record.boxes is not None:
            sides = np.array(corners(record.boxes), "<f4").reshape(-1, 4)
            values |= {BOXES: _ndarray(sides), BOX_LABELS: _ndarray(record.boxes["label"].astype("<i4"))}
        columns = {field.name: _encode(field, record.columns[field.name]) for field in self.source.schema}
        data = [(values | columns)[column.name] for column in self._columns]
        sizes = [len(value) for value, column in zip(data, self._columns, strict=True) if column.size is None]
        return b"".join([np.array(sizes, "<u4").tobytes(), *data])

    def finish(self, units: Sequence[FileEntry], folders: JobFolders) -> list[FileEntry]:
        shards = [
            {
                **self._config,
                "samples": unit.records,
                "raw_data": {
                    "basename": unit.name,
                    "bytes": unit.size,
                    "hashes": {"sha256": unit.sha256.removeprefix("sha256:")},
                },
                "zip_data": None,
            }
            for unit in units
        ]
        data = json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode()
        return [publish_file(INDEX, len(units), folders, lambda file: file.write(data))]


def _mds_column(field: Field) -> MdsColumn:
    codec = field.codec
    if not isinstance(codec, ArrayCodec):
        return MdsColumn(field.name, *ENCODINGS[field.kind][:2])
    element = SUBSTITUTES.get(codec.element, codec.element)
    sizes = (*codec.shape, 2) if codec.element.startswith("complex") else codec.shape
    size = np.dtype(element).itemsize
    if not sizes:
        return MdsColumn(field.name, element, size)
    fixed = [each for each in sizes if each]
    if len(fixed) < len(sizes):  # an encoding cannot name a free dimension, or one of size 0
        return MdsColumn(field.name, f"ndarray:{element}")
    return MdsColumn(field.name, f"ndarray:{element}:{','.join(map(str, fixed))}", size * math.prod(fixed))


def _encode(field: Field, value: Any) -> bytes:
    if field.kind in ENCODINGS:
        return ENCODINGS[field.kind][2](value)
    array = real_array(value)
    return _ndarray(array) if _mds_column(field).size is None else array.tobytes()


def _encode_integer(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _ndarray(array: npt.NDArray[Any]) -> bytes:
    """Return the bytes of an array after its number of dimensions and their sizes, in the smallest type."""
    most = max(array.shape)
    width = next(number for number in range(4) if most < 1 << (8 << number))
    sizes = np.array(array.shape, f"<u{1 << width}")
    return bytes([array.ndim << 2 | width]) + sizes.tobytes() + np.ascontiguousarray(array).tobytes()


ENCODINGS: dict[str, tuple[str, int | None, Callable[[Any], bytes]]] = {
    "image": ("bytes", None, bytes),
    "bytes": ("bytes", None, bytes),
    "text": ("str", None, str.encode),
    "json": ("json", None, lambda value: json.dumps(value).encode()),
    "int": ("int", 8, _encode_integer),
    "float": ("float64", 8, lambda value: np.float64(value).tobytes()),
    "label": ("int", 8, _encode_integer),
    "labels": ("ndarray:int32", None, _ndarray),
}
"""The encoding, size and encoder of a column by its kind; those of arrays depend on dtype and shape."""
