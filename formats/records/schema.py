"""The schema of a dataset's columns: ordered names and kinds, chosen or inferred from values.

A kind's codec encodes the values: numbers, text, bytes, JSON and arrays.
"""

from __future__ import annotations

import json
import math
import operator
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex, TypeGuard

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, DataError, UsageError, printable
from shardprep.formats.images.header import read_image_header
from shardprep.formats.runtime.owners import cached_property

MAX_VALUE_BYTES = 64 << 20  # the limit of an image
MAX_JSON_DEPTH = 100  # lists and dicts that a value lies in


class BadValue(DataError):
    """A value that the column's kind cannot hold; ``key`` is the record's."""


class Codec(ABC):
    """Encodes the values of one kind of column.

    Equal values give equal bytes, and ``decode(encode(value))`` equals ``value`` in type, shape and content.
    Pure, thread-safe and picklable.
    """

    dtype: np.dtype[Any] | None = None
    """The dtype of a value in a table; None if sizes vary."""

    @property
    def size(self) -> int | None:
        """The number of bytes of every value; None if it varies."""
        return None if self.dtype is None else self.dtype.itemsize

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value. Raises BadValue if the column cannot hold it."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value of encoded bytes. Raises BadValue for any others."""

    def are_valid(self, values: npt.NDArray[Any]) -> bool:
        """Whether :meth:`decode` takes the bytes of all these values of :attr:`dtype`."""
        return True


def is_masked(value: object) -> bool:
    """Whether the value is a masked array. ``numpy.ma`` is imported for arrays of subclasses only."""
    is_subclass = isinstance(value, np.ndarray) and type(value) is not np.ndarray
    return is_subclass and isinstance(value, np.ma.MaskedArray)


def refuse_masked(value: object) -> None:
    """Raise BadValue for a masked array, which would lose its mask."""
    if is_masked(value):
        raise BadValue(
            "has a masked array, which would lose its mask: give filled(value), and np.ma.getmaskarray() as "
            "another part"
        )


def bad_value(value: object, expected: str) -> BadValue:
    shape = f" of shape {value.shape} and dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    text = "" if isinstance(value, np.ndarray | bytes) else f" {printable(repr(value)[:80])}"
    return BadValue(f"expected {expected}, not {type(value).__name__}{text}{shape}")


def check_size(data: bytes) -> bytes:
    """Return the data of a value. Raises BadValue if it has more than MAX_VALUE_BYTES."""
    if len(data) > MAX_VALUE_BYTES:
        raise BadValue(f"has {len(data)} bytes; a value has at most {MAX_VALUE_BYTES}")
    return data


INT64 = np.iinfo(np.int64)
LABEL = np.dtype("<i4")


class IntegerCodec(Codec):
    """Integers of 64 bits; NumPy integers come back as Python's."""

    dtype = np.dtype("<i8")

    def encode(self, value: Any) -> bytes:
        if not is_integer(value):
            raise bad_value(value, "an integer")
        number = operator.index(value)
        if not INT64.min <= number <= INT64.max:
            raise bad_value(value, "an integer of 64 bits")
        return number.to_bytes(8, "little", signed=True)

    def decode(self, data: bytes) -> int:
        return int.from_bytes(_check_length(data, 8), "little", signed=True)


class FloatCodec(Codec):
    """Floats of 64 bits, including NaN and infinities; integers are accepted, too."""

    dtype = np.dtype("<f8")

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise bad_value(value, "a number")
        try:
            return struct.pack("<d", float(value))
        except OverflowError as error:
            raise bad_value(value, "a number that a float can hold") from error

    def decode(self, data: bytes) -> float:
        return float(np.frombuffer(_check_length(data, 8), "<f8")[0])


@dataclass(frozen=True)
class ClassCodec(Codec):
    """A kind whose values are among ``classes``."""

    classes: tuple[str, ...]

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}


class LabelCodec(ClassCodec):
    """One of ``classes``, given by name or number, or -1 for none; decoded to its number."""

    dtype = LABEL

    def encode(self, value: Any) -> bytes:
        return class_number(value, self._number_of, least=-1).to_bytes(4, "little", signed=True)

    def decode(self, data: bytes) -> int:
        label = int.from_bytes(_check_length(data, 4), "little", signed=True)
        if not -1 <= label < len(self.classes):
            raise BadValue(f"has the label {label}, but there are {len(self.classes)} classes")
        return label

    def are_valid(self, values: npt.NDArray[Any]) -> bool:
        return bool(((values >= -1) & (values < len(self.classes))).all())


class LabelsCodec(ClassCodec):
    """Any of ``classes``, each at most once, given by name or number; decoded to ascending int32 [n]."""

    def encode(self, value: Any) -> bytes:
        if isinstance(value, str | bytes | dict):
            raise bad_value(value, "several labels")
        try:
            numbers = sorted(class_number(each, self._number_of) for each in value)
        except TypeError as error:
            raise bad_value(value, "several labels") from error
        if len(set(numbers)) != len(numbers):
            raise bad_value(value, "labels that differ")
        return check_size(np.array(numbers, LABEL).tobytes())

    def decode(self, data: bytes) -> npt.NDArray[np.int32]:
        if len(data) % LABEL.itemsize:
            raise BadValue(f"has {len(data)} bytes, which are not labels")
        labels = np.frombuffer(data, LABEL)
        if len(labels) and (labels[0] < 0 or labels[-1] >= len(self.classes) or (np.diff(labels) <= 0).any()):
            raise BadValue(f"does not have ascending labels of {len(self.classes)} classes")
        return labels


def class_number(value: object, classes: Mapping[str, int], *, least: int = 0) -> int:
    """Return the number of a class given by name or number. Raises BadValue for an unknown one."""
    if isinstance(value, str):
        try:
            return classes[value]
        except KeyError as error:
            raise bad_value(value, f"one of {len(classes)} classes") from error
    if not is_integer(value):
        raise bad_value(value, "a label")
    number = operator.index(value)
    if not least <= number < len(classes):
        raise bad_value(value, f"a label below {len(classes)}")
    return number


def is_integer(value: object) -> TypeGuard[SupportsIndex]:
    """Whether the value is a Python or NumPy integer, and not a bool."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def _check_length(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise BadValue(f"has {len(data)} bytes, not {size}")
    return data


class BytesCodec(Codec):
    """Any bytes, unchanged."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise bad_value(value, "bytes")
        return check_size(bytes(value))

    def decode(self, data: bytes) -> bytes:
        return data


class ImageCodec(BytesCodec):
    """Image files, unchanged, with their headers checked."""

    def encode(self, value: Any) -> bytes:
        data = super().encode(value)
        try:
            read_image_header(data)
        except BadImage as error:
            raise BadValue(error.message) from error
        return data


class TextCodec(Codec):
    """Text as UTF-8."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise bad_value(value, "text")
        try:
            return check_size(value.encode())
        except UnicodeEncodeError as error:
            raise BadValue("is not Unicode text: it has surrogates") from error

    def decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadValue("is not UTF-8") from error


class JsonCodec(Codec):
    """JSON values: None, booleans, numbers, text, lists, and dicts with text as keys.

    Dicts keep their order. NaN, infinities, tuples and other objects are refused, as they would not come back
    unchanged.
    """

    def encode(self, value: Any) -> bytes:
        try:
            data = check_size(_compact(value))
        except TypeError as error:
            raise bad_value(value, "a value of JSON") from error
        except (ValueError, RecursionError) as error:
            raise BadValue(f"is not JSON: {error}") from error
        _check_json(value)  # json writes tuples as lists and numeric names as text
        return data

    def decode(self, data: bytes) -> Any:
        try:
            value = FINITE_JSON.decode(data.decode())
            if data.count(b"[") + data.count(b"{") > MAX_JSON_DEPTH:
                _check_json(value)
            if b"\\u" in data:
                _compact(value)  # raises for lone surrogates
        except (ValueError, RecursionError) as error:
            raise BadValue(f"is not JSON: {error}") from error
        return value


def _compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _check_json(value: Any) -> None:
    """Raise BadValue for other types than JSON's, and for deep nesting, which not every Python could read."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                if not all(type(name) is str for name in item):
                    raise bad_value(item, "a dict with text as keys")
                below.extend(item.values())
            elif type(item) is list:
                below.extend(item)
            elif item is not None and type(item) not in (bool, int, float, str):
                raise bad_value(item, "a value of JSON")
        if not below:
            return
        level = below
    raise BadValue(f"has values in more than {MAX_JSON_DEPTH} lists and dicts, one within the other")


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN or an infinity, as the ``parse_constant`` of a JSON decoder."""
    raise ValueError(f"{name} is not JSON")


def _parse_finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:80]} is too large for a float")
    return value


FINITE_JSON = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_parse_finite)


DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
MAX_DIMENSIONS = 8
MAX_EMPTY_ROWS = 1 << 18
FREE = "*"
SIZE = np.dtype("<u4")  # of a free dimension, before the array's bytes


@dataclass(frozen=True)
class ArrayCodec(Codec):
    """Arrays of ``element``, one of DTYPES; None in ``shape`` is a dimension of any size.

    The bytes are the sizes of the free dimensions (u32), then the elements in C order, all little-endian.
    Decoded arrays are read-only; without dimensions they are NumPy scalars.
    """

    element: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, kind: str) -> ArrayCodec | None:
        """Return the codec of a kind such as ``float32[*,4]``; None if it is not an array."""
        match = re.fullmatch(r"(\w+)\[([^\[\]]*)\]", kind)
        if match is None or match[1] not in DTYPES:
            return None
        sizes = [size.strip() for size in match[2].split(",")] if match[2].strip() else []
        if len(sizes) > MAX_DIMENSIONS or not all(re.fullmatch(r"\*|[0-9]{1,9}", size) for size in sizes):
            return None
        shape = tuple(None if size == FREE else int(size) for size in sizes)
        codec = cls(match[1], shape)
        fixed = math.prod(size for size in shape if size is not None) * codec.elements.itemsize
        return codec if fixed <= MAX_VALUE_BYTES else None

    @property
    def kind(self) -> str:
        """The text that :meth:`of` parses to this codec."""
        sizes = (FREE if size is None else str(size) for size in self.shape)
        return f"{self.element}[{','.join(sizes)}]"

    @cached_property
    def elements(self) -> np.dtype[Any]:
        return np.dtype(self.element).newbyteorder("<")

    @cached_property
    def dtype(self) -> np.dtype[Any] | None:
        return None if None in self.shape else np.dtype((self.elements, self.shape))

    def encode(self, value: Any) -> bytes:
        is_array = isinstance(value, np.ndarray | np.generic) and value.dtype == self.elements
        if not is_array or len(value.shape) != len(self.shape):
            raise bad_value(value, self.kind)
        sizes = list(zip(value.shape, self.shape, strict=True))
        if not all(fixed in (None, size) for size, fixed in sizes):
            raise bad_value(value, self.kind)
        if _has_many_empty_rows(value.shape):
            raise BadValue(f"has no elements, but more than {MAX_EMPTY_ROWS:,} rows")
        free = [size for size, fixed in sizes if fixed is None]
        return check_size(np.array(free, SIZE).tobytes() + np.ascontiguousarray(value).tobytes())

    def decode(self, data: bytes) -> npt.NDArray[Any]:
        dimensions = self.shape.count(None)
        start = dimensions * SIZE.itemsize
        if len(data) >= start:
            free = iter(np.frombuffer(data, SIZE, dimensions).tolist())
            shape = tuple(next(free) if size is None else size for size in self.shape)
            size = math.prod(shape) * self.elements.itemsize
            if len(data) - start == size and not _has_many_empty_rows(shape):
                with suppress(ValueError):  # NumPy limits the size even if another dimension is 0
                    array = np.frombuffer(data, self.elements, math.prod(shape), start).reshape(shape)
                    return array if shape else array[()]
        raise BadValue(f"has {len(data)} bytes, which are not {self.kind}")


def _has_many_empty_rows(shape: tuple[int, ...]) -> bool:
    """Whether nested lists of this shape would be many, although they take no bytes."""
    return 0 in shape and math.prod(shape[: shape.index(0)]) > MAX_EMPTY_ROWS


CODECS: dict[str, Codec] = {
    "image": ImageCodec(),
    "bytes": BytesCodec(),
    "text": TextCodec(),
    "json": JsonCodec(),
    "int": IntegerCodec(),
    "float": FloatCodec(),
}
CLASS_CODECS = {"label": LabelCodec, "labels": LabelsCodec}
KINDS = (*CODECS, *CLASS_CODECS, f"an array such as float32[*,4] of at most {MAX_VALUE_BYTES >> 20} MiB")
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
            raise UsageError(
                f"a column's name has 1 to 40 letters, digits, _, . and -, the last two not in front: {self.name!r}"
            )
        names = () if isinstance(self.classes, str | None) else tuple(self.classes)
        object.__setattr__(self, "classes", names)
        if self.kind in tuple(CLASS_CODECS):
            if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
                raise UsageError(f"the column {self.name} of kind {self.kind} needs classes, each named once")
        elif self.classes:
            raise UsageError(f"the column {self.name} of kind {self.kind} takes no classes")
        self.codec  # noqa: B018 - an unknown kind is an error here

    @cached_property
    def codec(self) -> Codec:
        """The codec of the column's values."""
        if self.kind in tuple(CLASS_CODECS):
            return CLASS_CODECS[self.kind](self.classes)
        codec = (CODECS.get(self.kind) or ArrayCodec.of(self.kind)) if isinstance(self.kind, str) else None
        if codec is None:
            raise UsageError(
                f"the column {self.name} has the unknown kind {self.kind!r}; choose from {', '.join(KINDS)}"
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
        return cls(value.get("name"), value.get("kind"), value.get("classes", ()))  # type: ignore[arg-type]


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
            advice = "leave some out, or put several into one of kind json"
            raise UsageError(f"there are {len(names)} columns; at most {MAX_COLUMNS} are allowed: {advice}")
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
        names = ", ".join(self.names) or "none"
        raise UsageError(f"there is no column {name!r}; the columns are: {names}")

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


def parse_column_choice(text: str, form: str) -> ColumnChoice:
    """Parse ``NAME[:KIND][=ORIGIN]``. Raises UsageError, which gives the expected ``form``."""
    head, _, origin = text.partition("=")
    name, kind = (part.strip() for part in head.partition(":")[::2])
    if not name or (":" in head and not kind):
        raise UsageError(f"expected {form}, not {text!r}")
    Field(name, kind or "bytes", ("a",) if kind in CLASS_CODECS else ())
    return ColumnChoice(name, kind, origin)


FIRST_ITEMS = 100  # items that a schema is inferred from
_PLAIN_JSON = {"int", "float", "text", "json"}


def infer_schema(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Schema:
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
        common = ""
        for place, row in enumerate(rows):
            try:
                kind = _kind_of_value(row[name])
                common = _common_kind(common, kind) if common and kind != common else kind
            except BadValue as error:
                raise BadValue(f"the column {name} {error.message}", key=str(place)) from error
        fields.append(Field(name, common))
    return Schema(fields)


def _kind_of_value(value: Any) -> str:
    match value:
        case np.str_() | str():
            return "text"
        case bytes() | bytearray() | memoryview():
            return "bytes"
        case np.ndarray() | np.generic():
            refuse_masked(value)
            if value.dtype.name not in DTYPES or value.dtype.newbyteorder("=") != value.dtype:
                raise BadValue(f"has an array of dtype {value.dtype}; choose from {', '.join(DTYPES)}")
            if value.ndim > MAX_DIMENSIONS:
                raise BadValue(
                    f"has an array of {value.ndim} dimensions; at most {MAX_DIMENSIONS} are allowed"
                )
            return f"{value.dtype.name}[{','.join(map(str, value.shape))}]"
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


def _common_kind(before: str, kind: str) -> str:
    """Return the kind that holds values of both kinds. Raises BadValue if there is none."""
    if before in _PLAIN_JSON and kind in _PLAIN_JSON:
        return "json"
    a, b = ArrayCodec.of(before), ArrayCodec.of(kind)
    if a is None or b is None or a.element != b.element or len(a.shape) != len(b.shape):
        raise BadValue(f"is {kind}, but was {before} before")
    sizes = zip(a.shape, b.shape, strict=True)
    return ArrayCodec(a.element, tuple(x if x == y else None for x, y in sizes)).kind


_EXACT = {"int": int, "float": float}


def encode_exactly(field: Field, value: Any) -> bytes:
    """Return the bytes of a value. Raises BadValue for a number that would come back with another type."""
    if field.kind in _EXACT and type(value) is not _EXACT[field.kind]:
        raise bad_value(value, field.kind)
    return field.codec.encode(value)


def split_schema(schema: Schema | Mapping[str, str] | Sequence[Field]) -> tuple[Schema, Mapping[str, str]]:
    """Return the columns of a schema, and the kinds it gives to the record's own names.

    Raises UsageError unless key is "text", image "image" and label "label".
    """
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, Schema) else Schema(schema), {}
    own = {name: kind for name, kind in schema.items() if name in OWN_KINDS}
    for name, kind in own.items():
        if kind != OWN_KINDS[name]:
            raise UsageError(
                f"{name!r} in a schema has the kind {OWN_KINDS[name]!r}, not {kind!r}; use another name"
            )
    return Schema({name: kind for name, kind in schema.items() if name not in own}), own


OWN_KINDS = {"key": "text", "image": "image", "label": "label"}
