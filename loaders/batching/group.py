"""Grouping records to batches in this process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any, Literal

from shardprep.formats.errors import UsageError

from .passes import Passes, Source, end
from .stack import shapes_of, stack

Remainder = Literal["keep", "drop"]


class Batches:
    """Batches of ``batch_size`` records each, stacked.

    Records are arrays, or tuples or dicts of arrays or numbers.

    Every array is new, contiguous and starts at a multiple of 64 bytes. ``remainder`` says whether a last
    batch that is not full is kept or dropped. Raises UsageError where records differ in shape, dtype or form.
    """

    batches_never_change = True

    def __init__(self, records: Source, batch_size: int, *, remainder: Remainder = "keep") -> None:
        if batch_size < 1 or remainder not in ("keep", "drop"):
            raise UsageError(
                f"batch_size={batch_size}, remainder={remainder!r}: give at least 1, and 'keep' or 'drop'"
            )
        self._records = Passes(records)
        self._batch_size = batch_size
        self._remainder = remainder

    def __len__(self) -> int:
        full, rest = divmod(len(self._records), self._batch_size)
        return full + (rest > 0 and self._remainder == "keep")

    def __iter__(self) -> Iterator[Any]:
        records = self._records.begin()
        try:
            least = self._batch_size if self._remainder == "drop" else 1
            yield from map(stack, grouped(records, repeat(self._batch_size), least=least))
        finally:
            end(records)


def grouped(records: Iterator[Any], sizes: Iterator[int], *, least: int = 1) -> Iterator[list[Any]]:
    """Yield lists of records, until the records end or a list would have fewer than ``least``.

    A list's size is drawn after its first record. No reference to a list is kept.
    """

    def group() -> list[Any]:
        rows = list(islice(records, 1))
        if rows:
            rows += islice(records, next(sizes) - 1)
        return rows if len(rows) >= least else []

    return iter(group, [])


def grouped_by_shape(records: Iterator[Any], size: int, *, with_rest: bool) -> Iterator[list[Any]]:
    """Yield lists of ``size`` records of the same shapes as they fill, then the rest, oldest first.

    No reference to a list is kept.
    """
    waiting: dict[Any, list[Any]] = {}

    def group_with(record: Any) -> list[Any]:
        shapes = shapes_of(record)
        group = waiting.setdefault(shapes, [])
        group.append(record)
        return waiting.pop(shapes) if len(group) == size else []

    yield from filter(None, map(group_with, records))
    while waiting and with_rest:
        yield waiting.pop(next(iter(waiting)))
