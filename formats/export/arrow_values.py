"""Columns of Arrow, and the features that Hugging Face's datasets takes them for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardprep.formats.columns.arrays import ArrayCodec
from shardprep.formats.columns.schema import Field

TYPES = {"bytes": "binary", "text": "string", "json": "string", "int": "int64", "float": "float64"}


@dataclass(frozen=True)
class Arrow:
    """A column: its type in Arrow, its feature, and the function that makes an array of a list of values."""

    kind: Any
    feature: Any
    array: Callable[[list[Any]], Any]


def value_of(pa: Any, kind: str, classes: Sequence[str] = ()) -> Arrow:
    """Return the column of a kind of values that are no lists, or of an element of arrays, such as float32.

    ``pa`` is pyarrow. Without classes a label is an integer.
    """
    if kind == "image":
        made = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        return Arrow(made, {"_type": "Image"}, lambda values: pa.array(values, made))
    if kind == "label":
        feature = {"names": list(classes), "_type": "ClassLabel"} if classes else _plain("int64")
        return Arrow(pa.int64(), feature, lambda values: pa.array(values, pa.int64()))
    name = TYPES.get(kind, kind)
    made = pa.type_for_alias(name)
    if kind == "json":
        return Arrow(made, _plain(name), lambda values: pa.array([_text(value) for value in values], made))
    return Arrow(made, _plain(name), lambda values: pa.array(values, made))


def list_of(pa: Any, item: Arrow) -> Arrow:
    """Return the column of lists of such values."""
    kind = pa.list_(item.kind)
    feature = {"feature": item.feature, "_type": "Sequence"}
    return Arrow(kind, feature, lambda values: pa.array(values, kind))


def column_of(pa: Any, field: Field) -> Arrow:
    """Return the column of a dataset's column. An array is a list of lists as deep as its dimensions.

    Complex numbers are lists of two.
    """
    codec = field.codec
    if isinstance(codec, ArrayCodec):
        return _arrays(pa, codec)
    if field.kind == "labels":
        return list_of(pa, value_of(pa, "label", field.classes))
    return value_of(pa, field.kind, field.classes)


def _arrays(pa: Any, codec: ArrayCodec) -> Arrow:
    depth = len(codec.shape)
    real = {"complex64": "float32", "complex128": "float64"}.get(codec.element)
    column = value_of(pa, real or codec.element)
    for _ in range(depth + bool(real)):
        column = list_of(pa, column)
    return Arrow(column.kind, column.feature, lambda values: _nested(pa, [_real(each) for each in values]))


def _nested(pa: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Return an array of lists from NumPy's arrays of one number of dimensions, without Python's numbers."""
    made = pa.array(np.concatenate([array.ravel() for array in arrays]))
    for axis in reversed(range(arrays[0].ndim)):
        counts = [math.prod(array.shape[:axis]) for array in arrays]
        lengths = np.repeat([array.shape[axis] for array in arrays], counts)
        made = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), made)
    return made


def _real(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    return np.stack([array.real, array.imag], axis=-1) if array.dtype.kind == "c" else array


def _plain(name: str) -> dict[str, str]:
    return {"dtype": name, "_type": "Value"}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
