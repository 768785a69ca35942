"""The schema of a dataset's columns: names and kinds, in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardprep.formats.errors import UsageError

from .arrays import ArrayCodec
from .codec import Codec
from .numeric import FloatCodec, IntegerCodec, LabelCodec, LabelsCodec
from .plain import BytesCodec, ImageCodec, JsonCodec, TextCodec

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
RESERVED = ("key", "label", "image")  # what every record has
MAX_COLUMNS = 256

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", re.ASCII)


@dataclass(frozen=True)
class Field:
    """A column's name and kind.

    ``name`` has 1 to 40 letters, digits, underscores, dots and hyphens, and begins with neither of the last
    two. ``kind`` is "image" (encoded), "bytes", "text", "json", "int" (64 bits), "float" (64 bits), "label"
    (one of ``classes``, -1 for none), "labels" (several of ``classes``), or an array's dtype and shape, such
    as ``float32[*,4]``: an asterisk is a dimension of any size, and ``float32[]`` a scalar. ``classes`` are
    unique names, in the order of their numbers. Raises UsageError for anything else.
    """

    name: str
    kind: str
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(f"a column's name has 1 to 40 letters, digits and _.-, not {self.name!r}")
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.kind in OF_CLASSES:
            if not self.classes or len(set(self.classes)) != len(self.classes):
                raise UsageError(
                    f"the column {self.name} of kind {self.kind} needs classes, each with one name"
                )
        elif self.classes:
            raise UsageError(f"the column {self.name} of kind {self.kind} has no classes")
        self.codec  # noqa: B018 - an unknown kind is an error here

    @cached_property
    def codec(self) -> Codec:
        """The codec of the column's values."""
        if self.kind in OF_CLASSES:
            return OF_CLASSES[self.kind](self.classes)
        codec = PLAIN.get(self.kind) or ArrayCodec.of(self.kind)
        if codec is None:
            raise UsageError(
                f"the column {self.name} has the unknown kind {self.kind!r}; known are {', '.join(KINDS)}"
            )
        return codec

    @property
    def is_fixed(self) -> bool:
        """Whether every value has the same number of bytes, so that the column is a table."""
        return self.codec.dtype is not None

    def to_json(self) -> dict[str, Any]:
        """Return the field as the manifest holds it."""
        return {"name": self.name, "kind": self.kind} | (
            {"classes": list(self.classes)} if self.classes else {}
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Field:
        """Return the field of a manifest; the inverse of :meth:`to_json`. Raises UsageError."""
        return cls(value["name"], value["kind"], tuple(value.get("classes", ())))


class Schema:
    """The columns beside key, label and image, in order.

    ``fields`` are :class:`Field` objects, or a mapping of names to kinds, such as
    ``{"mask": "image", "caption": "text", "boxes": "float32[*,4]"}``. Iterable, with ``len`` and ``==``; a
    field is found by its name. Raises UsageError for names that occur twice, in whatever case, or are
    reserved (RESERVED), and for more than MAX_COLUMNS.
    """

    def __init__(self, fields: Iterable[Field] | Mapping[str, str] = ()) -> None:
        if isinstance(fields, Mapping):
            fields = [Field(name, kind) for name, kind in fields.items()]
        self.fields: tuple[Field, ...] = tuple(fields)
        names = [field.name.lower() for field in self.fields]  # some file systems do not tell cases apart
        for name in names:
            if name in RESERVED or names.count(name) > 1:
                why = "a reserved name" if name in RESERVED else "there twice"
                raise UsageError(f"the column {name} is {why}")
        if len(names) > MAX_COLUMNS:
            raise UsageError(f"there are {len(names)} columns; at most {MAX_COLUMNS} are possible")

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
        return f"Schema({ {field.name: field.kind for field in self.fields} })"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(field.name for field in self.fields)
