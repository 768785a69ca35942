"""The schema of a dataset's columns: ordered names and kinds, chosen or inferred from values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.records.codecs import (
    DTYPES,
    INT64,
    MAX_DIMENSIONS,
    ArrayCodec,
    BadValue,
    BytesCodec,
    Codec,
    FloatCodec,
    ImageCodec,
    IntegerCodec,
    JsonCodec,
    LabelCodec,
    LabelsCodec,
    TextCodec,
    refuse_masked,
    refused,
)
from shardprep.formats.runtime.files import cached_property

PLAIN: dict[str, Codec] = {
    "image": ImageCodec(),
    "bytes": BytesCodec(),
    "text": TextCodec(),
    "json": JsonCodec(),
    "int": IntegerCodec(),
    "float": FloatCodec(),
}
OF_CLASSES = {"label": LabelCodec, "labels": LabelsCodec}
KINDS = (*PLAIN, *OF_CLASSES, "an array such as float32[*,4]")
RESERVED = ("key", "label", "image")  # parts of every record
MAX_COLUMNS = 256

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", re.ASCII)


@dataclass(frozen=True)
class Field:
    """A column's name and kind.

    ``name`` has 1 to 40 letters, digits, underscores, dots and hyphens, with no dot or hyphen in front.
    ``kind`` is "image" (encoded), "bytes", "text", "json", "int" (64 bits), "float" (64 bits), "label" (one
    of ``classes``, -1 for none), "labels" (several of ``classes``), or an array's dtype and shape, such as
    ``float32[*,4]``: an asterisk is a dimension of any size, and ``float32[]`` a scalar. ``classes`` are
    unique names, in the order of their numbers. Raises UsageError for anything else.
    """

    name: str
    kind: str
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(f"a column's name has 1 to 40 letters, digits, _, . and -, not {self.name!r}")
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.kind in OF_CLASSES:
            if not self.classes or len(set(self.classes)) != len(self.classes):
                raise UsageError(f"the column {self.name} of kind {self.kind} needs classes, each named once")
        elif self.classes:
            raise UsageError(f"the column {self.name} of kind {self.kind} takes no classes")
        self.codec  # noqa: B018 - an unknown kind is an error here

    @cached_property
    def codec(self) -> Codec:
        """The codec of the column's values."""
        if self.kind in OF_CLASSES:
            return OF_CLASSES[self.kind](self.classes)
        codec = (PLAIN.get(self.kind) or ArrayCodec.of(self.kind)) if isinstance(self.kind, str) else None
        if codec is None:
            raise UsageError(
                f"the column {self.name} has the unknown kind {self.kind!r}; known are {', '.join(KINDS)}"
            )
        return codec

    @property
    def is_fixed(self) -> bool:
        """Whether all values have the same number of bytes, so that the column is a table."""
        return self.codec.dtype is not None

    def to_json(self) -> dict[str, Any]:
        """Return the field for the manifest."""
        classes = {"classes": list(self.classes)} if self.classes else {}
        return {"name": self.name, "kind": self.kind} | classes

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Field:
        """Return the field of a manifest; the inverse of :meth:`to_json`. Raises UsageError."""
        return cls(value["name"], value["kind"], tuple(value.get("classes", ())))


class Schema:
    """The columns besides key, label and image, in order.

    ``fields`` are :class:`Field` objects, or a mapping of names to kinds, such as
    ``{"mask": "image", "caption": "text", "boxes": "float32[*,4]"}``. Iterable, with ``len`` and ``==``;
    ``schema[name]`` is a field. Raises UsageError for names that occur twice, ignoring case, or are RESERVED,
    and for more than MAX_COLUMNS.
    """

    def __init__(self, fields: Iterable[Field] | Mapping[str, str] = ()) -> None:
        if isinstance(fields, Mapping):
            fields = [Field(name, kind) for name, kind in fields.items()]
        self.fields: tuple[Field, ...] = tuple(fields)
        if wrong := [field for field in self.fields if not isinstance(field, Field)]:
            raise UsageError(f"a schema is a dict of names and kinds, or Fields, not {wrong[0]!r}")
        names = [field.name.lower() for field in self.fields]  # some file systems do not tell cases apart
        if len(names) > MAX_COLUMNS:
            raise UsageError(f"there are {len(names)} columns; at most {MAX_COLUMNS} are possible")
        for name in names:
            if name in RESERVED or names.count(name) > 1:
                why = "is a reserved name" if name in RESERVED else "occurs twice, ignoring case"
                raise UsageError(f"the column {name} {why}")

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        known = ", ".join(self.names) or "none"
        raise UsageError(f"there is no column {name!r}; the columns are: {known}")

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __repr__(self) -> str:
        return f"Schema({self.kinds})"

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of the columns by name, in order."""
        return {field.name: field.kind for field in self.fields}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(field.name for field in self.fields)


class ColumnChoice(NamedTuple):
    """A column's ``name``, its ``kind`` (empty to infer it from the values) and its ``origin``, as text."""

    name: str
    kind: str
    origin: str


def column_choice(text: str, form: str) -> ColumnChoice:
    """Parse ``NAME[:KIND][=ORIGIN]``. Raises UsageError, which gives the expected ``form``."""
    head, _, origin = text.partition("=")
    name, kind = (part.strip() for part in head.partition(":")[::2])
    if not name or (":" in head and not kind):
        raise UsageError(f"expected {form}, not {text!r}")
    Field(name, kind or "bytes", ("a",) if kind in OF_CLASSES else ())
    return ColumnChoice(name, kind, origin)


FIRST_ITEMS = 100  # items that a schema is inferred from
_PLAIN_JSON = {"int", "float", "text", "json"}


def found_schema(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Schema:
    """Infer the schema of the columns ``names`` from the first items.

    Bytes, text, integers of 64 bits and floats give the kinds of these names. None, booleans, lists and dicts
    give "json", as do several such kinds in one column. Arrays give their dtype and shape, with ``*`` where
    sizes differ.

    Raises:
        BadValue: No column can hold a value, or not with the others; ``key`` is the number of its item.
        UsageError: A column's name is invalid.
    """
    fields = []
    for name in names:
        known = ""
        for place, row in enumerate(rows):
            try:
                kind = _kind_of_value(row[name])
                known = _joined(known, kind) if known and kind != known else kind
            except BadValue as error:
                raise BadValue(f"the column {name} {error.message}", key=str(place)) from error
        fields.append(Field(name, known))
    return Schema(fields)


def _kind_of_value(value: Any) -> str:
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
        f"has an object of type {type(value).__name__}, which no column holds; make it bytes, text, a number, an array or "
        "a JSON value"
    )


def _kind_of_array(value: np.ndarray[Any, Any] | np.generic) -> str:
    refuse_masked(value)
    if value.dtype.name not in DTYPES or value.dtype.newbyteorder("=") != value.dtype:
        raise BadValue(f"has an array of dtype {value.dtype}; possible are {', '.join(DTYPES)}")
    if value.ndim > MAX_DIMENSIONS:
        raise BadValue(f"has an array of {value.ndim} dimensions; at most {MAX_DIMENSIONS} are possible")
    return f"{value.dtype.name}[{','.join(map(str, value.shape))}]"


def _joined(one: str, other: str) -> str:
    if one in _PLAIN_JSON and other in _PLAIN_JSON:
        return "json"
    a, b = ArrayCodec.of(one), ArrayCodec.of(other)
    if a is None or b is None or a.element != b.element or len(a.shape) != len(b.shape):
        raise BadValue(f"is {other}, but was {one} before")
    sizes = zip(a.shape, b.shape, strict=True)
    return ArrayCodec(a.element, tuple(x if x == y else None for x, y in sizes)).kind


_EXACT = {"int": int, "float": float}


def exact_bytes(field: Field, value: Any) -> bytes:
    """Return the bytes of a value. Raises BadValue for a number that would come back with another type."""
    if field.kind in _EXACT and type(value) is not _EXACT[field.kind]:
        raise refused(value, field.kind)
    return field.codec.encode(value)


def as_schema(given: Schema | Mapping[str, str] | Sequence[Field]) -> tuple[Schema, Mapping[str, str]]:
    """Return the columns of a schema, and the kinds it gives to the record's own names.

    Raises UsageError unless key is "text", image "image" and label "label".
    """
    if not isinstance(given, Mapping):
        return given if isinstance(given, Schema) else Schema(given), {}
    own = {name: kind for name, kind in given.items() if name in OWN_KINDS}
    for name, kind in own.items():
        if kind != OWN_KINDS[name]:
            raise UsageError(
                f"{name!r} in a schema has the kind {OWN_KINDS[name]!r}, not {kind!r}; use another name"
            )
    return Schema({name: kind for name, kind in given.items() if name not in own}), own


OWN_KINDS = {"key": "text", "image": "image", "label": "label"}
