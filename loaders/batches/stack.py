"""Stacking records into batches; the specs, rows and conversion of batches."""

from __future__ import annotations

import math
from cmath import isfinite
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.records.schema import is_masked
from shardprep.loaders.batches.passes import Passes, Source, ending
from shardprep.loaders.batches.pickling import allocate_aligned
from shardprep.loaders.batches.slots import NUMBERS, array_of
from shardprep.loaders.transforms.contract import ArraySpec, convert_leaves


def stack(records: Sequence[Any]) -> Any:
    """Stack records along a new first axis. Raises UsageError if they differ in form.

    Python's own numbers become bool, int64, float64 or complex128; strings and bytes are refused.
    """
    samples = _sample_of_each_type(records)
    if any(isinstance(sample, Mapping | tuple | list) for sample in samples):
        return _combine_parts(stack, records)
    for sample in samples:
        to_unmasked_array(sample)
    return _stack_arrays(list(map(np.asarray, records)))


def _sample_of_each_type(records: Sequence[Any]) -> Iterable[Any]:
    """Return one record of each type: checking the type of every record takes as long as stacking them."""
    return {type(record): record for record in records}.values()


def to_unmasked_array(part: Any) -> npt.NDArray[Any]:
    """Return a part of a record as an array. Raises UsageError for a masked array: its mask would be lost."""
    if is_masked(part):
        raise UsageError(
            "a masked array would lose its mask in a batch: give filled(value), and np.ma.getmaskarray() as "
            "another part"
        )
    return np.asarray(part)


def gather(records: Sequence[Any]) -> Any:
    """Stack records part by part, where a part is an element of tuples or dicts, or the record itself.

    Parts that differ in shape or dtype, or are neither arrays nor numbers, become a list with one element per
    record. Raises UsageError if records differ in form.
    """
    if any(isinstance(sample, Mapping | tuple) for sample in _sample_of_each_type(records)):
        return _combine_parts(gather, records)
    arrays = [array_of(record) for record in records]
    forms = {None if array is None else (array.shape, array.dtype.str) for array in arrays}
    if len(forms) == 1 and (first := arrays[0]) is not None and first.dtype.kind in NUMBERS:
        return _stack_arrays(arrays)  # type: ignore[arg-type]
    return [record if array is None else array for record, array in zip(records, arrays, strict=True)]


def gather_lists(records: Sequence[Any]) -> Any:
    """Return records as a tuple or dict of lists, one per part, or as one list if they have no parts."""
    if any(isinstance(sample, Mapping | tuple | list) for sample in _sample_of_each_type(records)):
        return _combine_parts(list, records)
    return list(records)


def _combine_parts(combine: Callable[[Sequence[Any]], Any], records: Sequence[Any]) -> Any:
    _require_same({type(record) for record in records}, "forms")
    first = records[0]
    if isinstance(first, Mapping):
        _require_same({", ".join(sorted(map(str, record))) for record in records}, "names")
        return {name: _combine_part(combine, name, [record[name] for record in records]) for name in first}
    remedy = "make them alike, and turn each list that is one part into an array"
    _require_same({len(record) for record in records}, "numbers of parts", remedy)
    return tuple(_combine_part(combine, n, part) for n, part in enumerate(zip(*records, strict=True)))


def _combine_part(combine: Callable[[Sequence[Any]], Any], name: object, values: Sequence[Any]) -> Any:
    try:
        return combine(values)
    except UsageError as error:
        error.add_note(f"In component {name!r}")
        raise


def _stack_arrays(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    for dtype in {row.dtype for row in rows}:
        if dtype.kind not in NUMBERS:
            what = {"S": "bytes", "U": "text"}.get(dtype.kind, f"dtype {dtype}")
            raise UsageError(
                f"records of {what} cannot be stacked; decode or convert them to numbers first, or keep lists of "
                "them (as_list=True)"
            )
    _require_same(
        {row.shape for row in rows}, "shapes", "make them of one shape, or keep lists of them (as_list=True)"
    )
    _require_same({row.dtype for row in rows}, "dtypes", "make them of one dtype")
    full = _empty_aligned((len(rows), *rows[0].shape), rows[0].dtype)
    for place, row in enumerate(rows):  # np.stack takes two to four times as long for small rows
        full[place] = row
    return full


def _empty_aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a new, uninitialised array aligned to 64 bytes."""
    return allocate_aligned(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


_map_parts = partial(convert_leaves, kinds=(Mapping, tuple))  # a list is a part of a batch


def row_count(batch: Any) -> int:
    """Return the number of rows of a batch. Raises UsageError if its parts differ in length."""
    counts: set[int] = set()
    _map_parts(batch, lambda part: counts.add(_part_rows(part)))
    if len(counts) != 1:
        raise UsageError(
            f"the parts of a batch must have the same number of rows; these have {sorted(counts) or 'none'}"
        )
    return counts.pop()


def _part_rows(part: Any) -> int:
    if isinstance(part, list) or (isinstance(part, np.ndarray) and part.ndim):
        return len(part)
    raise UsageError(f"a batch consists of arrays and lists with rows, not of {type(part).__name__}")


def pad_batch(batch: Any, size: int) -> Any:
    """Pad a batch of arrays with rows of zeros to ``size``, and add a mask, bool [size], True for real rows.

    The mask is the last part of a tuple, also for a single array, or is named "mask" in a dict. Raises
    UsageError if a dict already has that name.
    """
    mask, rows = _empty_aligned((size,), np.bool_), row_count(batch)
    mask[:] = np.arange(size) < rows
    full = _map_parts(batch, partial(_pad_rows, size=size))
    if not isinstance(full, dict):
        return (*full, mask) if isinstance(full, tuple) else (full, mask)
    if "mask" in full:
        raise UsageError("a padded batch gets a part named mask, which this batch already has; rename it")
    return full | {"mask": mask}


def _pad_rows(part: npt.NDArray[Any], *, size: int) -> npt.NDArray[Any]:
    if len(part) == size:
        return part
    full = _empty_aligned((size, *part.shape[1:]), part.dtype)
    full[: len(part)], full[len(part) :] = part, 0
    return full


@dataclass(frozen=True)
class Padding:
    """Function of a batch of lists that turns each list of arrays into an array. See :meth:`.Flow.pad`."""

    value: complex

    def __call__(self, batch: Any) -> Any:
        return _map_parts(batch, self._pad)

    def _pad(self, part: Any) -> Any:
        if not isinstance(part, list):
            raise UsageError(
                f"pad() is for batches of lists, not of {type(part).__name__}; add as_list=True to batch()"
            )
        arrays = [array for record in part if (array := array_of(record)) is not None]
        if len(arrays) < len(part) or any(array.dtype.kind not in NUMBERS for array in arrays):
            return part
        _require_same({array.ndim for array in arrays}, "numbers of dimensions")
        _require_same({array.dtype for array in arrays}, "dtypes")
        if len(shapes := {array.shape for array in arrays}) == 1:
            return _stack_arrays(arrays)
        full = _empty_aligned((len(arrays), *map(max, zip(*shapes, strict=True))), arrays[0].dtype)
        full[...] = self._value_as(full.dtype)
        for number, array in enumerate(arrays):
            inside: tuple[slice, ...] = tuple(slice(side) for side in array.shape)
            full[number][inside] = array
        return full

    def _value_as(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        try:
            with np.errstate(over="ignore"):
                value = np.array(self.value, dtype)
            is_whole = dtype.kind in "biu"
            is_held = value == self.value if is_whole else isfinite(value) or not isfinite(self.value)
        except (OverflowError, TypeError, ValueError):
            is_held = False
        if not is_held:
            raise UsageError(f"pad({self.value!r}): {dtype} does not hold that value")
        return value


def _require_same(values: set[Any], what: str, remedy: str = "make them alike") -> None:
    if len(values) > 1:
        names = " and ".join(sorted(str(getattr(value, "__name__", value)) for value in values))
        raise UsageError(f"records of one batch have different {what}: {names}; {remedy}")


def rows_of(batch: Any) -> Iterator[Any]:
    """Return a batch's rows: views of its arrays, elements of its lists. Raises UsageError if it has none."""
    row_count(batch)
    return _rows(batch)


def _rows(part: Any) -> Iterator[Any]:
    if isinstance(part, Mapping | tuple) and not part:
        return repeat(part)  # beside parts that have rows
    if isinstance(part, Mapping):
        return map(lambda *values: dict(zip(part, values, strict=True)), *map(_rows, part.values()))
    if isinstance(part, tuple):
        return map(lambda *values: values, *map(_rows, part))
    return iter(part)


def shapes_of(record: Any) -> Any:
    """Return the shapes of a record's arrays, nested like the record; hashable, and equal within a batch."""
    if isinstance(record, Mapping):
        return frozenset((name, shapes_of(part)) for name, part in record.items())
    return tuple(map(shapes_of, record)) if isinstance(record, tuple | list) else np.shape(record)


def group(records: Iterator[Any], sizes: Iterator[int], *, least: int = 1) -> Iterator[list[Any]]:
    """Yield lists of records until the records end, or fewer than ``least`` are left.

    A list's size is drawn after its first record. No reference to a list is kept.
    """

    def draw() -> list[Any]:
        rows = list(islice(records, 1))
        if rows:
            rows += islice(records, next(sizes) - 1)
        return rows if len(rows) >= least else []

    return iter(draw, [])


def group_by_shape(records: Iterator[Any], size: int, *, with_rest: bool) -> Iterator[list[Any]]:
    """Yield lists of ``size`` records of equal shapes, then the rest, oldest first; keep no reference."""
    waiting: dict[Any, list[Any]] = {}

    def group_with(record: Any) -> list[Any]:
        shapes = shapes_of(record)
        group = waiting.setdefault(shapes, [])
        group.append(record)
        return waiting.pop(shapes) if len(group) == size else []

    yield from filter(None, map(group_with, records))
    while waiting and with_rest:
        yield waiting.pop(next(iter(waiting)))


class JsonValues(list[Any]):
    """A list with one JSON value per record. Frames carry it unchanged, unlike lists of arrays."""


@dataclass(frozen=True)
class BatchSpec:
    """One part of a batch: its ``name``, its ``shape`` [rows, …] and its ``dtype``.

    The number of rows is None if it varies. A ``dtype`` of None stands for a list of bytes.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype[Any] | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row. Raises UsageError if rows have no fixed size."""
        if self.dtype is None or None in self.shape[1:]:
            raise UsageError(f"a capacity in bytes needs rows of fixed size, but those of {self.name} vary")
        return math.prod(self.shape[1:]) * self.dtype.itemsize  # type: ignore[arg-type]


def loader_specs(
    outputs: Sequence[ArraySpec] | None, *, rows: int | None, with_numbers: bool
) -> tuple[BatchSpec, ...]:
    """Return the parts of a loader's batches; without ``outputs``, encoded bytes."""
    specs = (
        [BatchSpec("image", (rows,), None)]
        if outputs is None
        else [BatchSpec(spec.name, (rows, *spec.shape), np.dtype(spec.dtype)) for spec in outputs]
    )
    names = ("label", "number") if with_numbers else ("label",)
    return (*specs, *(BatchSpec(name, (rows,), np.dtype(np.int64)) for name in names))


Convert = Callable[[Any], Any]


class Conversion:
    """The batches of ``source``, one epoch per iteration, each part converted by ``convert``.

    The structure of tuples, named tuples, lists and dicts is kept; everything else is a part. Errors are
    raised unchanged. An epoch that is left early is not continued. Not thread-safe.
    """

    def __init__(self, source: Source, convert: Convert) -> None:
        self.source = source
        self._passes = Passes(source)
        self._convert = convert

    def __len__(self) -> int:
        """Number of batches of the next iteration. Raises TypeError if the source has no length."""
        return len(self._passes)

    def __iter__(self) -> Iterator[Any]:
        return self._convert_batches(self._passes.begin())

    def _convert_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        with ending(batches):
            # `map`, because a loop variable would hold a batch while the next is made
            yield from map(partial(convert_leaves, convert=self._convert), batches)
