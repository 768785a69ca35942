"""The schema of values that have none: found from the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError

from .arrays import DTYPES, FREE, MAX_DIMENSIONS
from .codec import BadValue, Codec, refused
from .numeric import INT64
from .schema import Field, Schema

FIRST_ITEMS = 100  # items that a schema is found from
_PLAIN_JSON = {"int", "float", "text", "json"}


def found_schema(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Schema:
    """Return the schema of the columns ``names`` of the first items.

    Bytes, text, integers of 64 bits and floats have the kinds of these names; None, booleans, lists and dicts
    are "json", and so are different kinds of these in one column. Arrays have their dtype and shape, with
    ``*`` where sizes differ. Raises BadValue for values that no column can hold, UsageError for bad names.
    """
    fields = []
    for name in names:
        try:
            fields.append(Field(name, found_kind([row[name] for row in rows])))
        except BadValue as error:
            raise BadValue(f"the column {name} {error.message}", key=error.key) from error
    return Schema(fields)


def found_kind(values: Sequence[Any]) -> str:
    """Return the kind of a column that holds these values.

    Raises BadValue, with the value's place as ``key``, for one that no column holds, or not with the others.
    """
    known = ""
    for place, value in enumerate(values):
        try:
            kind = kind_of_value(value)
            known = _joined(known, kind) if known and kind != known else kind
        except BadValue as error:
            raise BadValue(error.message, key=str(place)) from error
    return known


def kind_of_value(value: Any) -> str:
    """Return the kind of a column for one value. Raises BadValue if there is none."""
    match value:
        case np.str_() | str():
            return "text"
        case bytes() | bytearray() | memoryview():
            return "bytes"
        case np.ndarray() | np.generic():
            return _kind_of_array(value)
        case bool() | None | list() | dict():
            return "json"
        case int():
            return "int" if INT64.min <= value <= INT64.max else "json"
        case float():
            return "float"
    raise BadValue(
        f"has a {type(value).__name__}, which no column holds: make it bytes, text, a number, an array, or a value of JSON"
    )


def _kind_of_array(value: np.ndarray[Any, Any] | np.generic) -> str:
    if value.dtype.name not in DTYPES or value.dtype.newbyteorder("=") != value.dtype:
        known = ", ".join(DTYPES)
        raise BadValue(f"has an array of dtype {value.dtype}, and these are possible: {known}")
    if value.ndim > MAX_DIMENSIONS:
        raise BadValue(f"has an array of {value.ndim} dimensions; at most {MAX_DIMENSIONS} are possible")
    return f"{value.dtype.name}[{','.join(map(str, value.shape))}]"


def _joined(one: str, other: str) -> str:
    if one in _PLAIN_JSON and other in _PLAIN_JSON:
        return "json"
    (dtype, sizes), (other_dtype, other_sizes) = _array_parts(one), _array_parts(other)
    if not dtype or dtype != other_dtype or len(sizes) != len(other_sizes):
        raise BadValue(f"is {other}, and before it was {one}")
    shape = (a if a == b else FREE for a, b in zip(sizes, other_sizes, strict=True))
    return f"{dtype}[{','.join(shape)}]"


def _array_parts(kind: str) -> tuple[str, list[str]]:
    dtype, bracket, sizes = kind.partition("[")
    return (dtype if bracket else "", sizes.rstrip("]").split(",") if sizes.rstrip("]") else [])


class ExactCodec(Codec):
    """A codec that refuses numbers of another type than the column's, which would come back changed."""

    def __init__(self, field: Field) -> None:
        self._codec = field.codec
        self._kind = field.kind
        self._type = {"int": int, "float": float}.get(field.kind)

    def encode(self, value: Any) -> bytes:
        if self._type is not None and type(value) is not self._type:
            raise refused(value, self._kind)
        return self._codec.encode(value)

    def decode(self, data: bytes) -> Any:
        return self._codec.decode(data)


def as_schema(given: Schema | Mapping[str, str] | Sequence[Field]) -> tuple[Schema, Mapping[str, str]]:
    """Return the columns of a schema, and the kinds that it gives to the record's own names.

    Raises UsageError for other kinds than "text" for key, "image" for image and "label" for label.
    """
    if not isinstance(given, Mapping):
        return given if isinstance(given, Schema) else Schema(given), {}
    own = {name: kind for name, kind in given.items() if name in OWN_KINDS}
    for name, kind in own.items():
        if kind != OWN_KINDS[name]:
            raise UsageError(
                f"{name!r} in a schema is of kind {OWN_KINDS[name]!r}, not {kind!r}; use another name"
            )
    return Schema({name: kind for name, kind in given.items() if name not in own}), own


OWN_KINDS = {"key": "text", "image": "image", "label": "label"}
