"""Dataclasses as JSON, and made of it again, checked by the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from shardprep.formats.errors import DataError, UnknownVersion
from shardprep.loaders.order.receipt import natural


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


def built_fields(kind: Any, value: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass from its JSON, as :func:`built` does, but not those ``without``."""
    hints, found = get_type_hints(kind), {}
    for field in fields(kind):
        if field.name not in without and (field.default is MISSING or field.name in value):
            try:
                found[field.name] = built(hints[field.name], value[field.name])
            except (TypeError, ValueError) as error:
                raise TypeError(f"its {field.name}: {error}") from error
    return found


@contextmanager
def naming_file(path: Path, where: str = "") -> Iterator[None]:
    """Name the file, and the place ``where`` in it, in the errors of what is read from it."""
    try:
        yield
    except (DataError, UnknownVersion) as error:
        raise type(error)(f"{where}{error.message}", path=path) from error
