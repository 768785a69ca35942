"""Canonical JSON: one text for each value, fit for hashing; shapes of parsed values; dataclasses as JSON."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

# Lists, objects and their elements: each takes some 200 bytes of memory, and 2 bytes of a file. A list of
# shards or classes in a file of 64 MiB has fewer, because an entry has at least 100 bytes.
MOST_PARTS = 2_500_000


def canonical_json(value: object) -> bytes:
    """Return a value as ASCII JSON: sorted keys, no spaces, no NaN or infinity, a newline at the end."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def parse_canonical_json(data: bytes) -> Any:
    """Return the value of the canonical text ``data``. Raises ValueError for any other text.

    The comparison with the canonical text refuses duplicate keys, NaN, other escapes, other forms of numbers
    and white space in one rule. Memory is bounded: more parts than MOST_PARTS are a ValueError.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > MOST_PARTS:
        raise ValueError(f"has more than {MOST_PARTS} parts")
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


FILE: dict[str, Any] = {"name": FILE_NAME, "size": int, "sha256": SHA256, "records": int}
"""The shape of a file in a manifest: a name within the folder, a size, a digest and a count."""


def matches(value: object, shape: Any) -> bool:
    """Whether a parsed value has a shape.

    A shape is a type, where whole numbers have 63 bits; a regular expression of a whole text; a list of the
    shape of all elements; a dict of the shapes of exactly these keys; or a function.
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
    """Whether the value is a string without lone surrogates, which have no UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def natural(value: object, *, below: float = math.inf) -> int:
    """Check a count or number of a file. Raises ValueError unless it is an int from 0 to ``below``."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r} is not a number of 0 or more")
    return value


def plain(value: Any) -> Any:
    """Return a value of JSON types: dataclasses become their fields, or what their ``to_json`` returns."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return list(map(plain, value)) if isinstance(value, tuple) else value


def built(kind: Any, value: Any) -> Any:
    """Return a value of a type from its JSON.

    The type is a dataclass, one with ``from_json``, a tuple or dict of one kind, a plain type, or one of
    these ``| None``. Whole numbers are 0 or more. Fields with defaults may be missing. Raises KeyError,
    TypeError or ValueError for other values.
    """
    if isinstance(kind, UnionType):
        return None if value is None else built(get_args(kind)[0], value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(built(get_args(kind)[0], part) for part in value)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: built(get_args(kind)[1], part) for name, part in value.items()}
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**built_fields(kind, value))
    if kind is int:
        return natural(value)
    if type(value) is not kind:
        raise TypeError(f"{json.dumps(value)[:100]} has the wrong type")
    return value


def built_fields(kind: Any, value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass from its JSON, as :func:`built` does."""
    hints, found = get_type_hints(kind), {}
    for field in fields(kind):
        if field.default is MISSING or field.name in value:
            try:
                found[field.name] = built(hints[field.name], value[field.name])
            except (TypeError, ValueError) as error:
                raise TypeError(f"its {field.name}: {error}") from error
    return found
