"""The columns of a Parquet file: which has the image, which the label, and the kinds of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardprep.formats.columns.schema import Field
from shardprep.formats.sources.record_files.column_fields import column_name

_IMAGES, _LABELS = ("image", "img"), ("label", "labels")
_METADATA = b"huggingface"
_BINARY = ("binary", "large_binary")
_TEXT = ("string", "large_string")
_AS_TEXT = ("timestamp", "date", "time", "decimal")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = {"float": "float32", "double": "float64", "halffloat": "float16"}
_NUMBERS = (*_INTEGERS, *_FLOATS)
_LISTS = ("list<", "large_list<", "fixed_size_list<")


@dataclass(frozen=True)
class ParquetLayout:
    """The columns with image and label, "" for none; the names of its classes; the columns beside them.

    ``fields`` maps the other columns of the file to fields. With ``in_struct`` an image has bytes
    and path.
    """

    image: str
    in_struct: bool
    label: str
    classes: tuple[str, ...]
    fields: Mapping[str, Field]


def layout_of(schema: Any, nullable: frozenset[str]) -> ParquetLayout:
    """Return the layout of a pyarrow schema; ``nullable`` are the columns with nulls. Raises ValueError."""
    features = _features(schema)
    names: list[str] = schema.names
    if len(set(names)) < len(names):
        raise ValueError("two columns have one name")
    images = [name for name in names if _is_image(schema.field(name).type, features.get(name))]
    image = next((name for name in (*_IMAGES, *images) if name in images or name in _binaries(schema)), "")
    of_classes = [name for name in names if _classes(features.get(name)) is not None]
    integers = [name for name in _LABELS if name in names and str(schema.field(name).type) in _INTEGERS]
    label = next((name for name in (*_LABELS, *of_classes) if name in (*integers, *of_classes)), "")
    others = [name for name in names if name not in (image, label)]
    return ParquetLayout(
        image=image,
        in_struct=image in images,
        label=label,
        classes=_classes(features.get(label)) or (),
        fields={name: _field(name, schema.field(name).type, features.get(name), nullable) for name in others},
    )


def _features(schema: Any) -> dict[str, Any]:
    """Return what the library datasets says of each column."""
    text = (schema.metadata or {}).get(_METADATA)
    features = json.loads(text)["info"]["features"] if text else {}
    if not isinstance(features, dict):
        raise ValueError("its features of Hugging Face are no mapping")
    return features


def _is_image(kind: Any, feature: Any) -> bool:
    """Whether a column has bytes and paths of images."""
    text = str(kind)
    says = not isinstance(feature, dict) or feature.get("_type", "Image") == "Image"
    return says and text in (
        "struct<bytes: binary, path: string>",
        "struct<bytes: large_binary, path: string>",
    )


def _binaries(schema: Any) -> Iterator[str]:
    return (name for name in _IMAGES if name in schema.names and str(schema.field(name).type) in _BINARY)


def _classes(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a ClassLabel; None for any other feature. Raises ValueError."""
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("the names of its classes are no list of text")
    return tuple(names)


def _field(name: str, kind: Any, feature: Any, nullable: frozenset[str]) -> Field:
    column = column_name(name)
    text = str(kind)
    if _is_image(kind, feature):
        return Field(column, "image")
    if text in _BINARY:
        return Field(column, "bytes")
    if name in nullable:
        return Field(column, "json")
    classes = _classes(feature)
    if classes and text in _NUMBERS:
        return Field(column, "label", classes)
    return Field(column, _kind(kind))


def _kind(kind: Any) -> str:
    """Return the kind of a column without nulls; JSON for what has no other."""
    text = str(kind)
    if text in _INTEGERS:
        return "int"
    if text in _FLOATS:
        return "float"
    if text in _TEXT or text.startswith(_AS_TEXT):
        return "text"
    if text == "bool":
        return "bool[]"
    if text.startswith(_LISTS) and (element := str(kind.value_type)) in (*_NUMBERS, "bool"):
        size = kind.list_size if text.startswith("fixed") else "*"
        return f"{_FLOATS.get(element, element)}[{size}]"
    return "json"
