"""Parquet, as Hugging Face's datasets reads it: images with their features in the schema's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, BinaryIO

from shardprep.formats.columns.schema import Field
from shardprep.formats.containers.table import Rows
from shardprep.formats.errors import UsageError

from .arrow_values import Arrow, column_of, list_of, value_of
from .export_format import Exportable, ShardFormat, refuse_taken
from .export_record import ExportRecord, corners

MOST_IMAGES = 100  # of a row group: a reader holds a row group in memory
GROUP_BYTES = 128 << 20
OBJECTS = "objects"


class Parquet(ShardFormat):
    """Files with the columns image, key, label, objects (boxes) and those of the dataset."""

    name = "parquet"

    def __init__(self, source: Exportable, index: Rows) -> None:
        super().__init__(source, index)
        self.writer = f"1, pyarrow {arrow().__version__}"
        for field in source.schema:
            refuse_taken(self.name, field, {OBJECTS} if source.has_boxes else ())

    def unit_name(self, number: int, count: int) -> str:
        return f"{self.source.split}-{number:05d}-of-{count:05d}.parquet"

    def bytes_beside(self) -> int:
        return 256 + 32 * len(self.source.schema)

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        pa = arrow()
        columns = self._columns()
        features = {name: column.feature for name, column in columns.items()}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        schema = pa.schema([(name, column.kind) for name, column in columns.items()], metadata=metadata)
        options = {"compression": "none", "use_dictionary": False, "write_statistics": ["label"]}
        with pa.parquet.ParquetWriter(file, schema, **options) as writer:
            for group in _groups(records):
                rows = [self._row(record) for record in group]
                arrays = [column.array([row[name] for row in rows]) for name, column in columns.items()]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(rows))

    def _columns(self) -> dict[str, Arrow]:
        pa = arrow()
        classes = [each.name for each in self.source.labels.classes]
        label = value_of(pa, "label", classes)
        columns = {"image": value_of(pa, "image")} if self.source.has_images else {}
        columns |= {"label": label, "key": value_of(pa, "text")}
        if self.source.has_boxes:
            box = list_of(pa, list_of(pa, value_of(pa, "float32")))
            columns[OBJECTS] = _struct(pa, {"bbox": box, "category": list_of(pa, label)})
        return columns | {field.name: column_of(pa, field) for field in self.source.schema}

    def _row(self, record: ExportRecord) -> dict[str, Any]:
        row: dict[str, Any] = {
            "image": {"bytes": record.image, "path": record.key},
            "label": record.label,
            "key": record.key,
        }
        if record.boxes is not None:
            row[OBJECTS] = {"bbox": corners(record.boxes), "category": record.boxes["label"].tolist()}
        return row | {field.name: _given(field, record) for field in self.source.schema}


def _given(field: Field, record: ExportRecord) -> Any:
    value = record.columns[field.name]
    return {"bytes": value, "path": None} if field.kind == "image" else value


def _struct(pa: Any, parts: dict[str, Arrow]) -> Arrow:
    kind = pa.struct([(name, part.kind) for name, part in parts.items()])
    return Arrow(
        kind, {name: part.feature for name, part in parts.items()}, lambda values: pa.array(values, kind)
    )


def _groups(records: Iterable[ExportRecord]) -> Iterator[list[ExportRecord]]:
    """Yield the records of one row group after the other, of few images and bytes."""
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
    """Return pyarrow. Raises UsageError where it is not installed."""
    try:
        import pyarrow  # an extra
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow: pip install 'shardprep[parquet]'") from error
    return pyarrow
