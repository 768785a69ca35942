"""Stacking records of equal form to a batch, and the rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.memory import aligned
from shardprep.loaders.buffers.row_form import NUMBERS, array_of


def stack(records: Sequence[Any]) -> Any:
    """Stack records along a new first axis. Raises UsageError where they differ in form.

    Python's own numbers become bool, int64, float64 or complex128; strings and bytes are refused.
    """
    _same({type(record) for record in records}, "forms")
    if isinstance(records[0], Mapping | tuple | list):
        return _in_columns(stack, records)
    return _stacked([np.asarray(record) for record in records])


def gathered(records: Sequence[Any]) -> Any:
    """Stack records part by part: a tuple or dict of parts, or one part where they are neither.

    A part that differs in shape or dtype between records, or is neither an array nor a number, becomes a list
    with one element per record. Raises UsageError where records differ in form.
    """
    if any(isinstance(record, Mapping | tuple) for record in records):
        _same({type(record) for record in records}, "forms")
        return _in_columns(gathered, records)
    arrays = [array_of(record) for record in records]
    forms = {None if array is None else (array.shape, array.dtype.str) for array in arrays}
    if len(forms) == 1 and (first := arrays[0]) is not None and first.dtype.kind in NUMBERS:
        return _stacked(arrays)  # type: ignore[arg-type]
    return [record if array is None else array for record, array in zip(records, arrays, strict=True)]


def listed(records: Sequence[Any]) -> Any:
    """Return records as a tuple or dict of lists, one for each part; as one list where they have no parts."""
    if any(isinstance(record, Mapping | tuple | list) for record in records):
        _same({type(record) for record in records}, "forms")
        return _in_columns(list, records)
    return list(records)


def _in_columns(made_of: Callable[[Sequence[Any]], Any], records: Sequence[Any]) -> Any:
    first = records[0]
    if isinstance(first, Mapping):
        _same({tuple(record) for record in records}, "names")
        return {name: made_of([record[name] for record in records]) for name in first}
    _same({len(record) for record in records}, "numbers of parts")
    return tuple(map(made_of, zip(*records, strict=True)))


def _stacked(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    _same({row.shape for row in rows}, "shapes")
    _same({row.dtype.str for row in rows}, "dtypes")
    dtype = rows[0].dtype
    if dtype.kind not in NUMBERS:
        raise UsageError(
            f"records of dtype {dtype} cannot be stacked; convert them to numbers, or keep lists of them (as_list=True)"
        )
    return np.stack(rows, out=_fresh((len(rows), *rows[0].shape), dtype))


def _fresh(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A new, uninitialised array that starts at a multiple of 64 bytes."""
    return aligned(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def row_count(batch: Any) -> int:
    """Number of rows of all arrays and lists of a batch. Raises UsageError where they differ."""
    counts = set(_row_counts(batch))
    if len(counts) != 1:
        raise UsageError(
            f"the parts of a batch must have the same number of rows; these have {sorted(counts) or 'none'}"
        )
    return counts.pop()


def _row_counts(part: Any) -> Iterator[int]:
    if isinstance(part, Mapping | tuple):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from _row_counts(inner)
    elif isinstance(part, list) or (isinstance(part, np.ndarray) and part.ndim):
        yield len(part)
    else:
        raise UsageError(f"a batch consists of arrays and lists with rows, not of {type(part).__name__}")


def padded(batch: Any, size: int) -> Any:
    """Pad a batch of arrays with rows of zeros to ``size``, and add a mask, bool [size], True for real rows.

    The mask is the last part of a tuple, to which a single array is converted, or is named "mask" in a dict.
    Raises UsageError where a dict has that name already.
    """
    mask, rows = _fresh((size,), np.bool_), row_count(batch)
    mask[:] = np.arange(size) < rows
    full = _filled(batch, size)
    if not isinstance(full, dict):
        return (*full, mask) if isinstance(full, tuple) else (full, mask)
    if "mask" in full:
        raise UsageError("a padded batch gets a part named mask, which this batch already has; rename it")
    return full | {"mask": mask}


def _filled(part: Any, size: int) -> Any:
    if isinstance(part, Mapping):
        return {name: _filled(inner, size) for name, inner in part.items()}
    if isinstance(part, tuple):
        return tuple(_filled(inner, size) for inner in part)
    if len(part) == size:
        return part
    full = _fresh((size, *part.shape[1:]), part.dtype)
    full[: len(part)], full[len(part) :] = part, 0
    return full


def _same(found: set[Any], what: str) -> None:
    if len(found) > 1:
        raise UsageError(f"records of one batch have different {what}: {sorted(map(_name, found))}")


def _name(found: Any) -> str:
    return str(getattr(found, "__name__", found))


def rows_of(batch: Any) -> Iterator[Any]:
    """Return a batch's rows: views of its arrays, elements of its lists. Raises UsageError without rows."""
    row_count(batch)
    return _rows(batch)


def _rows(part: Any) -> Iterator[Any]:
    if isinstance(part, Mapping):
        return map(lambda *values: dict(zip(part, values, strict=True)), *map(_rows, part.values()))
    if isinstance(part, tuple):
        return map(lambda *values: values, *map(_rows, part))
    return iter(part)


def shapes_of(record: Any) -> Any:
    """The shapes of a record's arrays, in the record's form; hashable, and equal within a batch."""
    if isinstance(record, Mapping):
        return tuple((name, shapes_of(part)) for name, part in record.items())
    if isinstance(record, tuple | list):
        return tuple(map(shapes_of, record))
    return np.shape(record)
