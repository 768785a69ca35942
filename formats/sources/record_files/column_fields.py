"""The names of columns, and their values as bytes."""

from __future__ import annotations

import re
from typing import Any

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.schema import RESERVED, Field

_OTHER = re.compile(r"[^A-Za-z0-9_.-]", re.ASCII)


def column_name(name: str) -> str:
    """Return the column's name for a name in a file: ``image/height`` becomes ``image.height``.

    Characters that no column may have become ``_``, and a reserved name gets one at its end.
    """
    plain = _OTHER.sub("_", name.replace("/", "."))
    plain = f"_{plain}" if plain[:1] in ("", ".", "-") else plain
    return f"{plain}_" if plain.lower() in RESERVED else plain


def encoded(field: Field, value: Any, *, path: str, key: str) -> bytes:
    """Return the bytes of a value. Raises BadValue with its column and place."""
    try:
        return field.codec.encode(value)
    except BadValue as error:
        raise BadValue(f"the column {field.name}: {error.message}", path=path, key=key) from error
