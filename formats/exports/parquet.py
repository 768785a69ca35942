"""Parquet for Hugging Face's datasets: images, with their features in the schema; also as Croissant.

Croissant describes the files in JSON-LD, for dataset catalogues and mlcroissant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

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
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.shards.read import FileEntry, Rows
from shardprep.formats.sources.parquet import import_arrow

MAX_IMAGES = 100  # in a row group, which a reader holds in memory
GROUP_BYTES = 128 << 20
OBJECTS = "objects"
ARROW_TYPES = {"bytes": "binary", "text": "string", "json": "string", "int": "int64", "float": "float64"}


class Parquet(ExportFormat):
    """Files with the columns image, key, label, objects (boxes) and the dataset's own."""

    name = "parquet"
    overhead = 16  # the label and the key
    unit_names = "{split}-{number:05d}-of-{count:05d}.parquet"
    box_names: ClassVar[tuple[str, ...]] = (OBJECTS,)

    def __init__(self, source: ExportSource, index: Rows, report_done: Callable[[int], None]) -> None:
        super().__init__(source, index, report_done)
        self.writer = f"1, pyarrow {import_arrow().__version__}"

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        pa = import_arrow()
        columns = self._columns()
        features = {name: column.feature for name, column in columns.items()}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        schema = pa.schema([(name, column.kind) for name, column in columns.items()], metadata=metadata)
        shaped = {field.name for field in self.source.schema if isinstance(field.codec, ArrayCodec)}
        options = {"compression": "none", "use_dictionary": False, "write_statistics": ["label"]}
        with pa.parquet.ParquetWriter(file, schema, **options) as writer:
            for group in _row_groups(records):
                rows = [self._row(record) for record in group]
                arrays = []
                for name, column in columns.items():
                    values = [row[name] for row in rows]
                    arrays.append(_nest_arrays(values) if name in shaped else pa.array(values, column.kind))
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(rows))

    def _columns(self) -> dict[str, ArrowColumn]:
        label = scalar_column("label", [each.name for each in self.source.labels.classes])
        columns = {"image": scalar_column("image")} if self.source.has_images else {}
        columns |= {"label": label, "key": scalar_column("text")}
        if self.source.has_boxes:
            parts = {"bbox": list_of(list_of(scalar_column("float32"))), "category": list_of(label)}
            kind = import_arrow().struct([(name, part.kind) for name, part in parts.items()])
            columns[OBJECTS] = ArrowColumn(kind, {name: part.feature for name, part in parts.items()})
        return columns | {field.name: arrow_column(field) for field in self.source.schema}

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


class ArrowColumn(NamedTuple):
    """A column's Arrow type, and its feature."""

    kind: Any
    feature: Any


def scalar_column(kind: str, classes: Sequence[str] = ()) -> ArrowColumn:
    """Return the column of a kind that is not a list, or of an element; a label without classes is an int."""
    pa = import_arrow()
    if kind == "image":
        return ArrowColumn(pa.struct([("bytes", pa.binary()), ("path", pa.string())]), {"_type": "Image"})
    if kind == "label" and classes:
        return ArrowColumn(pa.int64(), {"names": list(classes), "_type": "ClassLabel"})
    name = "int64" if kind == "label" else ARROW_TYPES.get(kind, kind)
    return ArrowColumn(pa.type_for_alias(name), {"dtype": name, "_type": "Value"})


def list_of(item: ArrowColumn) -> ArrowColumn:
    return ArrowColumn(import_arrow().list_(item.kind), {"feature": item.feature, "_type": "Sequence"})


def arrow_column(field: Field) -> ArrowColumn:
    """Return the Arrow column of a column. Arrays are nested lists, complex numbers lists of two."""
    codec = field.codec
    if isinstance(codec, ArrayCodec):
        real = {"complex64": "float32", "complex128": "float64"}.get(codec.element)
        column = scalar_column(real or codec.element)
        for _ in range(len(codec.shape) + bool(real)):
            column = list_of(column)
        return column
    if field.kind == "labels":
        return list_of(scalar_column("label", field.classes))
    return scalar_column(field.kind, field.classes)


def _nest_arrays(values: list[Any]) -> Any:
    """Return NumPy arrays of equal dimensionality as an array of nested lists, without Python numbers."""
    pa, arrays = import_arrow(), [real_array(value) for value in values]
    nested = pa.array(np.concatenate([array.ravel() for array in arrays]))
    for axis in reversed(range(arrays[0].ndim)):
        counts = [math.prod(array.shape[:axis]) for array in arrays]
        lengths = np.repeat([array.shape[axis] for array in arrays], counts)
        nested = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), nested)
    return nested


def _row_groups(records: Iterable[ExportRecord]) -> Iterator[list[ExportRecord]]:
    """Yield the records in row groups, limited in images and bytes."""
    group: list[ExportRecord] = []
    size = 0
    for record in records:
        group.append(record)
        for value in (record.image, *record.columns.values()):
            size += int(getattr(value, "nbytes", 0)) or (len(value) if isinstance(value, bytes | str) else 0)
        if len(group) == MAX_IMAGES or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


FORMAT = "application/x-parquet"  # as mlcroissant names it
VERSION = "http://mlcommons.org/croissant/1.1"
CROISSANT_TYPES = {"image": "sc:ImageObject", "int": "sc:Integer", "label": "sc:Integer", "float": "sc:Float"}
"""Croissant's type of each kind; other kinds are text, and arrays have their elements' type."""

_OWN = """arrayShape citeAs column conformsTo:dct containedIn equivalentProperty extract field fileObject fileProperty
fileSet format includes isArray isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated
replace samplingRate separator source subField transform"""
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    **{
        name: f"{prefix or 'cr'}:{name}" for name, _, prefix in (word.partition(":") for word in _OWN.split())
    },
    **{name: {"@id": f"cr:{name}", "@type": "@json"} for name in ("data", "examples")},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    **{name: {"@container": "@language"} for name in ("name", "description")},
}
"""The context of Croissant 1.1."""


class Croissant(Parquet):
    """The files of :class:`Parquet`, and ``croissant.json`` with their SHA-256, classes and fields."""

    name = "croissant"
    box_names = OBJECTS, "boxes", "box_labels"

    def finish(self, units: Sequence[FileEntry], folders: JobFolders) -> list[FileEntry]:
        records = sum(unit.records for unit in units)
        data = json.dumps(self._description(units, records), indent=2, ensure_ascii=False).encode() + b"\n"
        return [publish_file("croissant.json", records, folders, lambda file: file.write(data))]

    def _description(self, units: Sequence[FileEntry], records: int) -> dict[str, Any]:
        source = self.source
        files = [
            _part(
                "FileObject",
                unit.name,
                contentUrl=unit.name,
                encodingFormat=FORMAT,
                contentSize=f"{unit.size} B",
                sha256=unit.sha256.removeprefix("sha256:"),
            )
            for unit in units
        ]
        fields = [_field("image", "image", "sc:ImageObject", part="bytes")] if source.has_images else []
        fields += [_field("label", "label", "sc:Integer"), _field("key", "key", "sc:Text")]
        if source.has_boxes:
            # not cr:BoundingBox: mlcroissant reads only one for each record
            fields.append(_field("boxes", OBJECTS, "sc:Float", part="bbox", shape=(None, 4)))
            fields.append(_field("box_labels", OBJECTS, "sc:Integer", part="category", shape=(None,)))
        fields += map(_describe_field, source.schema)
        classes = []
        if source.labels.classes:
            kinds = {"classes/label": "sc:Integer", "classes/name": "sc:Text"}
            classes = [
                _part(
                    "RecordSet",
                    "classes",
                    dataType="sc:Enumeration",
                    key={"@id": "classes/label"},
                    field=[_part("Field", place, dataType=kind) for place, kind in kinds.items()],
                    data=[
                        {"classes/label": label, "classes/name": each.name}
                        for label, each in enumerate(source.labels.classes)
                    ],
                )
            ]
        return {
            "@context": CONTEXT,
            "@type": "sc:Dataset",
            "conformsTo": VERSION,
            "name": source.split,
            "description": f"The {source.split} split of the shards with the root {source.root}: "
            f"{count_of(records, 'record')}.",
            "identifier": source.root,
            "distribution": [*files, _part("FileSet", "files", encodingFormat=FORMAT, includes="*.parquet")],
            "recordSet": [*classes, _part("RecordSet", "records", key={"@id": "records/key"}, field=fields)],
        }


def _part(kind: str, place: str, **values: Any) -> dict[str, Any]:
    """Return a part of the description; ``place`` is its ID and ends with its name."""
    return {"@type": f"cr:{kind}", "@id": place, "name": place.rpartition("/")[2], **values}


def _field(
    name: str, column: str, kind: str, *, part: str | None = None, shape: Sequence[int | None] = ()
) -> dict[str, Any]:
    """Return a field of the values of a column, or of a ``part`` of each; with ``shape``, of arrays."""
    source: dict[str, Any] = {"fileSet": {"@id": "files"}, "extract": {"column": column}}
    if part is not None:
        source["transform"] = {"jsonPath": part}
    field = _part("Field", f"records/{name}", dataType=kind, source=source)
    if shape:
        sides = ",".join("-1" if side is None else str(side) for side in shape)
        field |= {"isArray": True, "arrayShape": sides}
    return field


def _describe_field(field: Field) -> dict[str, Any]:
    kind, codec = CROISSANT_TYPES.get(field.kind, "sc:Text"), field.codec
    part = "bytes" if field.kind == "image" else None
    shape: tuple[int | None, ...] = ()
    if isinstance(codec, ArrayCodec):
        element = codec.elements.kind
        kind = {"b": "sc:Boolean", "i": "sc:Integer", "u": "sc:Integer"}.get(element, "sc:Float")
        shape = (*codec.shape, 2) if element == "c" else codec.shape
    elif field.kind == "labels":
        kind, shape = "sc:Integer", (None,)
    return _field(field.name, field.name, kind, part=part, shape=shape)
