"""The values of a table's cells: text of CSV, or values of JSON, as a column of some kind holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.arrays import ArrayCodec
from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.schema import Field

SEPARATOR = "|"  # of several labels in one cell of CSV
_FROM = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


def encoded_cell(field: Field, cell: Any, *, typed: bool) -> bytes:
    """Return a cell as its column stores it; ``typed`` cells are values of JSON, others text.

    Raises BadValue, which names the column.
    """
    try:
        return field.codec.encode(_value(field, cell, typed=typed))
    except (ValueError, BadValue, RecursionError) as error:
        raise BadValue(f"the column {field.name}: {getattr(error, 'message', error)}") from error


def names_in(cell: Any, kind: str, *, typed: bool) -> Sequence[str]:
    """Return the names of classes in a cell of kind label or labels. Raises ValueError."""
    if kind == "labels" and typed:
        if not isinstance(cell, list):
            raise ValueError(f"has labels that are no list: {str(cell)[:80]!r}")
        return [label_name(each) for each in cell]
    text = "" if cell is None else label_name(cell)
    names = [name.strip() for name in text.split(SEPARATOR)] if kind == "labels" else [text.strip()]
    return [name for name in names if name]


def _value(field: Field, cell: Any, *, typed: bool) -> Any:
    kind, codec = field.kind, field.codec
    if kind in ("label", "labels"):
        names = names_in(cell, kind, typed=typed)
        return names if kind == "labels" else (names[0] if names else -1)
    if isinstance(codec, ArrayCodec):
        return array_of(codec, cell if typed else json.loads(cell))
    return cell if typed else _value_of_text(kind, cell)


def _value_of_text(kind: str, text: str) -> Any:
    if kind == "text":
        return text
    if kind == "json":
        return json.loads(text) if text.strip() else None
    if kind == "float" and not text.strip():
        return math.nan
    if "_" in text:
        raise ValueError(f"expected a number, not {text[:80]!r}")
    return int(text) if kind == "int" else float(text)


def array_of(codec: ArrayCodec, value: Any) -> npt.NDArray[Any]:
    """Return nested lists of numbers as an array of the codec. Raises ValueError for what it cannot hold."""
    if value == []:
        return np.zeros([size or 0 for size in codec.shape], codec.elements)
    found = np.asarray(value)
    if found.dtype.kind not in _FROM.get(codec.elements.kind, ""):
        raise ValueError(f"expected numbers for {codec.kind}, not {str(value)[:80]}")
    with np.errstate(over="ignore"):
        array: npt.NDArray[Any] = found.astype(codec.elements)
    is_float = codec.elements.kind == "f"
    if not (np.isfinite(array) == np.isfinite(found)).all() or (not is_float and (array != found).any()):
        raise ValueError(f"expected numbers that {codec.kind} can hold, not {str(value)[:80]}")
    return array if codec.shape else array[()]


def label_name(value: Any) -> str:
    """Return the name of a class as JSON or CSV has it. Raises ValueError for what is none."""
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise ValueError(f"has a label that is neither text nor a whole number: {str(value)[:80]!r}")
