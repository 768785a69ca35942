"""Croissant: Parquet files described in JSON-LD, for dataset catalogues and mlcroissant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardprep.formats.exports.format import Places, published
from shardprep.formats.exports.parquet import OBJECTS, Parquet
from shardprep.formats.records.codecs import ArrayCodec
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.schema import Field
from shardprep.formats.runtime.sizes import count_of
from shardprep.formats.shards.read import FileEntry

FORMAT = "application/x-parquet"  # as mlcroissant names it
VERSION = "http://mlcommons.org/croissant/1.1"
TYPES = {"image": "sc:ImageObject", "int": "sc:Integer", "label": "sc:Integer", "float": "sc:Float"}
"""The type of each kind; other kinds are text, and arrays have their elements' type."""

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
    names_of_boxes = OBJECTS, "boxes", "box_labels"

    def finish(self, units: Sequence[FileEntry], places: Places) -> list[FileEntry]:
        records = sum(unit.records for unit in units)
        data = json.dumps(self._description(units, records), indent=2, ensure_ascii=False).encode() + b"\n"
        return [published("croissant.json", records, places, lambda file: file.write(data))]

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
        fields += map(_column, source.schema)
        return {
            "@context": CONTEXT,
            "@type": "sc:Dataset",
            "conformsTo": VERSION,
            "name": source.split,
            "description": f"The {source.split} split of the shards with the root {source.root}: "
            f"{count_of(records, 'record')}.",
            "identifier": source.root,
            "distribution": [*files, _part("FileSet", "files", encodingFormat=FORMAT, includes="*.parquet")],
            "recordSet": [
                *_classes(source.labels),
                _part("RecordSet", "records", key={"@id": "records/key"}, field=fields),
            ],
        }


def _part(kind: str, place: str, **values: Any) -> dict[str, Any]:
    """Return a part of the description; ``place`` is its ID and ends with its name."""
    return {"@type": f"cr:{kind}", "@id": place, "name": place.rpartition("/")[2], **values}


def _classes(labels: LabelSpace) -> list[dict[str, Any]]:
    """Return the record set of the classes, with label and name, if there are any."""
    if not labels.classes:
        return []
    kinds = {"classes/label": "sc:Integer", "classes/name": "sc:Text"}
    named = enumerate(each.name for each in labels.classes)
    return [
        _part(
            "RecordSet",
            "classes",
            dataType="sc:Enumeration",
            key={"@id": "classes/label"},
            field=[_part("Field", place, dataType=kind) for place, kind in kinds.items()],
            data=[{"classes/label": label, "classes/name": name} for label, name in named],
        )
    ]


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


def _column(field: Field) -> dict[str, Any]:
    kind, codec = TYPES.get(field.kind, "sc:Text"), field.codec
    part = "bytes" if field.kind == "image" else None
    shape: tuple[int | None, ...] = ()
    if isinstance(codec, ArrayCodec):
        element = codec.elements.kind
        kind = {"b": "sc:Boolean", "i": "sc:Integer", "u": "sc:Integer"}.get(element, "sc:Float")
        shape = (*codec.shape, 2) if element == "c" else codec.shape
    elif field.kind == "labels":
        kind, shape = "sc:Integer", (None,)
    return _field(field.name, field.name, kind, part=part, shape=shape)
