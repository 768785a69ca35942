"""Parquet for Hugging Face's datasets: images, with their features in the schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from shardprep.formats.errors import MissingExtra
from shardprep.formats.exports.format import Exportable, ExportRecord, ShardFormat, corners, real_array
from shardprep.formats.records.codecs import ArrayCodec
from shardprep.formats.records.schema import Field
from shardprep.formats.shards.read import Rows

MOST_IMAGES = 100  # in a row group, which a reader holds in memory
GROUP_BYTES = 128 << 20
OBJECTS = "objects"
TYPES = {"bytes": "binary", "text": "string", "json": "string", "int": "int64", "float": "float64"}


class Parquet(ShardFormat):
    """Files with the columns image, key, label, objects (boxes) and the dataset's own."""

    name = "parquet"
    unit_names = "{split}-{number:05d}-of-{count:05d}.parquet"
    bytes_beside = 256, 32
    names_of_boxes: ClassVar[tuple[str, ...]] = (OBJECTS,)

    def __init__(self, source: Exportable, index: Rows) -> None:
        super().__init__(source, index)
        self.writer = f"1, pyarrow {arrow().__version__}"

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        pa = arrow()
        columns = self._columns()
        features = {name: column.feature for name, column in columns.items()}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        schema = pa.schema([(name, column.kind) for name, column in columns.items()], metadata=metadata)
        shaped = {field.name for field in self.source.schema if isinstance(field.codec, ArrayCodec)}
        options = {"compression": "none", "use_dictionary": False, "write_statistics": ["label"]}
        with pa.parquet.ParquetWriter(file, schema, **options) as writer:
            for group in _groups(records):
                rows = [self._row(record) for record in group]
                arrays = []
                for name, column in columns.items():
                    values = [row[name] for row in rows]
                    arrays.append(_nested(values) if name in shaped else pa.array(values, column.kind))
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(rows))

    def _columns(self) -> dict[str, Arrow]:
        label = value_of("label", [each.name for each in self.source.labels.classes])
        columns = {"image": value_of("image")} if self.source.has_images else {}
        columns |= {"label": label, "key": value_of("text")}
        if self.source.has_boxes:
            parts = {"bbox": list_of(list_of(value_of("float32"))), "category": list_of(label)}
            kind = arrow().struct([(name, part.kind) for name, part in parts.items()])
            columns[OBJECTS] = Arrow(kind, {name: part.feature for name, part in parts.items()})
        return columns | {field.name: column_of(field) for field in self.source.schema}

    def _row(self, record: ExportRecord) -> dict[str, Any]:
        row: dict[str, Any] = {
            "image": {"bytes": record.image, "path": record.key},
            "label": record.label,
            "key": record.key,
        }
        if record.boxes is not None:
            row[OBJECTS] = {"bbox": corners(record.boxes), "category": record.boxes["label"].tolist()}
        for field in self.source.schema:
            value = record.columns[field.name]
            if field.kind == "image":
                value = {"bytes": value, "path": None}
            elif field.kind == "json":
                value = json.dumps(value, ensure_ascii=False)
            row[field.name] = value
        return row


class Arrow(NamedTuple):
    """A column's Arrow type, and its feature."""

    kind: Any
    feature: Any


def value_of(kind: str, classes: Sequence[str] = ()) -> Arrow:
    """Return the column of a kind that is no list, or of an array's element, such as float32.

    A label without classes is an integer.
    """
    pa = arrow()
    if kind == "image":
        return Arrow(pa.struct([("bytes", pa.binary()), ("path", pa.string())]), {"_type": "Image"})
    if kind == "label" and classes:
        return Arrow(pa.int64(), {"names": list(classes), "_type": "ClassLabel"})
    name = "int64" if kind == "label" else TYPES.get(kind, kind)
    return Arrow(pa.type_for_alias(name), {"dtype": name, "_type": "Value"})


def list_of(item: Arrow) -> Arrow:
    return Arrow(arrow().list_(item.kind), {"feature": item.feature, "_type": "Sequence"})


def column_of(field: Field) -> Arrow:
    """Return the Arrow column of a column. Arrays are nested lists, complex numbers lists of two."""
    codec = field.codec
    if isinstance(codec, ArrayCodec):
        real = {"complex64": "float32", "complex128": "float64"}.get(codec.element)
        column = value_of(real or codec.element)
        for _ in range(len(codec.shape) + bool(real)):
            column = list_of(column)
        return column
    if field.kind == "labels":
        return list_of(value_of("label", field.classes))
    return value_of(field.kind, field.classes)


def _nested(values: list[Any]) -> Any:
    """Return NumPy arrays of equal dimensionality as an array of nested lists, without Python numbers."""
    pa, arrays = arrow(), [real_array(value) for value in values]
    made = pa.array(np.concatenate([array.ravel() for array in arrays]))
    for axis in reversed(range(arrays[0].ndim)):
        counts = [math.prod(array.shape[:axis]) for array in arrays]
        lengths = np.repeat([array.shape[axis] for array in arrays], counts)
        made = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), made)
    return made


def _groups(records: Iterable[ExportRecord]) -> Iterator[list[ExportRecord]]:
    """Yield the records in row groups, limited in images and bytes."""
    group: list[ExportRecord] = []
    size = 0
    for record in records:
        group.append(record)
        size += len(record.image) + sum(map(_size_of, record.columns.values()))
        if len(group) == MOST_IMAGES or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _size_of(value: Any) -> int:
    return int(getattr(value, "nbytes", 0)) or (len(value) if isinstance(value, bytes | str) else 0)


@cache
def arrow() -> Any:
    """Return pyarrow. Raises MissingExtra if it is not installed."""
    try:
        import pyarrow  # an extra
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra.of("Parquet", "pyarrow", "parquet") from error
    return pyarrow
