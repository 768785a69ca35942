"""Canonical JSON, with exactly one text per value; shapes of parsed values; dataclasses as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import islice
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.files import name_in_data_errors, read_small_file, save_bytes
from shardprep.formats.runtime.user_paths import user_path

# Lists, objects and their elements. Each takes some 200 bytes of memory, but maybe only 2 in a file. A 64 MiB
# list of shards or classes has fewer, because an entry has at least 100 bytes.
MAX_PARTS = 2_500_000


def canonical_json(value: object) -> bytes:
    """Return a value as ASCII JSON with sorted keys, no spaces, no NaN or infinity, and a final newline."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def parse_canonical_json(data: bytes) -> Any:
    """Parse canonical JSON. Raises ValueError for any other text.

    This refuses duplicate keys, NaN, other escapes, other forms of numbers, and white space. Memory is
    bounded: more than MAX_PARTS parts raise ValueError.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > MAX_PARTS:
        raise ValueError(f"has more than {MAX_PARTS} parts")
    try:
        value = json.loads(data.decode("ascii"))
        is_canonical = canonical_json(value) == data
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not is_canonical:
        raise ValueError("not in canonical form")
    return value


def sha256_of(value: object) -> str:
    """Return ``sha256:<hex>`` of a value's canonical JSON."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")

FILE_SHAPE: dict[str, Any] = {"name": FILE_NAME, "size": int, "sha256": SHA256, "records": int}
"""The shape of a file in a manifest: a name within the folder, a size, a digest and a count."""


def matches(value: object, shape: Any) -> bool:
    """Whether a parsed value has this shape.

    A shape is a type (ints are 0 to 2**63 - 1), a regex for a whole string, a list with the shape
    of all elements, a dict with the shapes of exactly these keys, or a predicate.
    """
    if isinstance(shape, type):
        return type(value) is shape and (not isinstance(value, int) or 0 <= value < 1 << 63)
    if isinstance(shape, re.Pattern):
        return isinstance(value, str) and shape.fullmatch(value) is not None
    if isinstance(shape, list):
        return isinstance(value, list) and all(matches(each, shape[0]) for each in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict) or value.keys() != shape.keys():
            return False
        return all(matches(value[name], each) for name, each in shape.items())
    return bool(shape(value))


def is_text(value: object) -> bool:
    """Whether the value is a string without lone surrogates, which UTF-8 cannot encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_natural(value: object) -> int:
    """Return the value if it is an int of 0 or more. Otherwise raise ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{_json_head(value)} is not a number of 0 or more")
    return value


def _json_head(value: object) -> str:
    """Return the beginning of a value's JSON, however deep it is."""
    return "".join(islice(json.JSONEncoder(default=repr).iterencode(value), 100))[:100]


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types. Dataclasses become dicts of fields, unless they have ``to_json``."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}
    return list(map(to_json_value, value)) if isinstance(value, tuple) else value


def parse_as(kind: Any, value: Any) -> Any:
    """Convert parsed JSON to a type.

    The type is a dataclass, a class with ``from_json``, a tuple or dict with elements of one type, a plain
    type, or one of these ``| None``. Ints must be 0 or more. Fields with defaults may be missing. Raises
    KeyError, TypeError or ValueError for other values.
    """
    if kind is int:
        return parse_natural(value)
    if type(value) is kind:  # most values: a manifest has thousands
        return value
    if isinstance(kind, UnionType):
        return None if value is None else parse_as(get_args(kind)[0], value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(parse_as(get_args(kind)[0], part) for part in value)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: parse_as(get_args(kind)[1], part) for name, part in value.items()}
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**parse_fields(kind, value))
    raise TypeError(f"{_json_head(value)} has the wrong type")


_hints_of = cache(get_type_hints)  # which compiles all annotations again


def parse_fields(kind: Any, value: Any) -> dict[str, Any]:
    """Convert parsed JSON to the fields of a dataclass, as :func:`parse_as` does."""
    hints, values = _hints_of(kind), {}
    for field in fields(kind):
        if field.default is MISSING or field.name in value:
            try:
                values[field.name] = parse_as(hints[field.name], value[field.name])
            except (TypeError, ValueError) as error:
                raise TypeError(f"its {field.name}: {error}") from error
    return values


MAX_JSON_BYTES = 64 << 20  # bytes of a file


def read_json_file(path: str | os.PathLike[str], *, most: int = MAX_JSON_BYTES, what: str = "JSON") -> Any:
    """Read a JSON file. Raises DataError, which names the file, and OSError."""
    path = user_path(path)
    try:
        return json.loads(read_small_file(path, most))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not {what}: {error}", path=path) from error


class JsonRecord:
    """Shared base of dataclasses saved as a JSON object of their fields, a ``KIND`` and a ``VERSION``.

    Fields with the default None, which earlier releases do not know, are left out if they are None.
    """

    KIND: ClassVar[str]
    ADVICE: ClassVar[str]
    VERSION: ClassVar[int] = 1
    MAX_BYTES: ClassVar[int] = 1 << 20  # of a file

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        own: Any = self
        values = {field: getattr(self, field.name) for field in fields(own)}
        parts = {f.name: to_json_value(v) for f, v in values.items() if not (f.default is v is None)}
        return {"format": f"shardprep {self.KIND}", "version": self.VERSION} | parts

    @classmethod
    def is_format_of(cls, value: Any) -> bool:
        """Whether a JSON value has this format. Raises UnknownVersion for another version of it."""
        is_own = isinstance(value, dict) and value.get("format") == f"shardprep {cls.KIND}"
        if is_own and value.get("version") != cls.VERSION:
            found = f"{cls.KIND} version {value.get('version')!r}"
            raise UnknownVersion(f"{found}; this release knows {cls.VERSION}; {cls.ADVICE}")
        return is_own

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record of JSON of any release. Raises DataError for other values, UnknownVersion."""
        if not cls.is_format_of(value):
            raise DataError(f"is not a {cls.KIND}; {cls.ADVICE}")
        try:
            record = cls(**parse_fields(cls, value))
            if not is_within(value, record.to_json()):
                raise ValueError("its parts are inconsistent")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, UsageError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"is a damaged {cls.KIND} ({why}); {cls.ADVICE}") from error
        return record

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file, replacing an existing one. Raises OSError, OperationError."""
        save_bytes(user_path(path), canonical_json(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file. Raises DataError if it holds no such record, UnknownVersion, OSError."""
        value = read_json_file(path, most=cls.MAX_BYTES, what=f"a {cls.KIND}; {cls.ADVICE}")
        with name_in_data_errors(user_path(path)):
            return cls.from_json(value)


def is_within(part: Any, whole: Any) -> bool:
    """Whether two values are equal, except for members that the first, by an earlier release, lacks."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return part.keys() <= whole.keys() and all(is_within(part[name], whole[name]) for name in part)
    is_same = part is whole and type(part) in (str, int)  # as nearly all: a log has many lines
    return is_same or canonical_json(part) == canonical_json(whole)
