"""Functions of each item, called in the consumer's thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Any

import numpy as np

from shardprep.formats.columns.column_record import ColumnRecord
from shardprep.formats.columns.schema import RESERVED
from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import Record
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.checks import seed_of
from shardprep.loaders.flow.core.length import Length
from shardprep.loaders.flow.core.node import Node, Step, described
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.flow.core.user_function import ErrorNote, Function
from shardprep.loaders.transforms.contract import ArraySpec, Transform, outputs_of

from .per_item import PerItem


@dataclass(frozen=True)
class Mapped(PerItem):
    """``function(item)`` for each item, or ``function(item, rng)`` with ``random``.

    A result of None raises UsageError; with ``drop_none`` it is left out.
    """

    source: Node
    function: Function
    _: KW_ONLY
    drop_none: bool
    random: bool
    seed: int

    def __post_init__(self) -> None:
        seed_of(self.seed)

    @property
    def description(self) -> str:
        return described(self, f"drop_none={self.drop_none}", f"random={self.random}", f"seed={self.seed}")

    @property
    def length(self) -> Length:
        return self.source.length.filtered() if self.drop_none else self.source.length

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick and not self.drop_none

    @property
    def label(self) -> str:
        return f"map({self.function.name})"

    def result(self, now: PassContext, number: int, item: Any) -> Any:
        """Call the function. Thread-safe if the function is."""
        with ErrorNote(now, number, self.label):
            rng = (now.rng(self, self.seed, number),) if self.random else ()
            found = self.function(item, *rng)
            if found is None and not self.drop_none:
                raise UsageError(
                    f"{self.function.name} returned None for item {number}: return a value, "
                    "or leave such items out with drop_none=True"
                )
            return found

    def wanted(self, results: Iterator[Any]) -> Iterator[Any]:
        return filter(_is_not_none, results) if self.drop_none else results


def _is_not_none(result: Any) -> bool:
    return result is not None


@dataclass(frozen=True)
class Map(Mapped):
    """A map that calls the function when the consumer asks for an item."""


@dataclass(frozen=True)
class Filter(Step):
    """The items for which ``function(item)`` is true."""

    source: Node
    function: Function

    @property
    def label(self) -> str:
        return f"filter({self.function.name})"

    @property
    def length(self) -> Length:
        return self.source.length.filtered()

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def run(self, now: PassContext) -> Iterator[Any]:
        items, numbers = self.drawn(now), count()

        def is_wanted(item: Any) -> bool:
            with ErrorNote(now, next(numbers), self.label):
                return bool(self.function(item))

        try:
            yield from filter(now.here.timed(self.label, is_wanted), items)
        finally:
            end(items)


LABEL = ArraySpec("label", (), "int64")


@dataclass(frozen=True)
class Transforming:
    """Makes (what the transform returns, label) from (encoded image, label). Picklable if the transform is.

    The record that the transform gets has an empty key. A dict in place of the image has the image and the
    columns; in place of the item it may have key and label, too. The note of an error has the item's number.
    """

    transform: Transform

    @property
    def outputs(self) -> tuple[ArraySpec, ...] | None:
        """The specs of a result; None where the transform does not declare its own."""
        declared = outputs_of(self.transform)
        return None if declared is None else (*declared, LABEL)

    def __call__(self, item: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        record = _record_of(item)
        made = self.transform(record, rng)
        return (*(made if isinstance(made, tuple) else (made,)), np.int64(record.label))


def _record_of(item: Any) -> Record:
    """Return the record that a transform is given for an item."""
    if isinstance(item, Record):
        return item
    if isinstance(item, dict):
        return _record_of_values(item)
    if isinstance(item, tuple | list) and len(item) == 2:
        image, label = item
        if isinstance(image, dict):
            return _record_of_values(image | {"label": label})
        return Record("", int(label), image)
    raise UsageError(
        f"a transform is for items of (image, label), or for dicts, not for a {type(item).__name__}"
    )


def _record_of_values(values: dict[str, Any]) -> Record:
    label = values.get("label", UNLABELLED)
    if isinstance(label, str):
        raise UsageError("a transform needs labels as numbers: from_dataset(path, columns=...) has them")
    columns = {name: value for name, value in values.items() if name not in RESERVED}
    record = Record(values.get("key", ""), int(label), values.get("image", b""))
    return ColumnRecord.of(record, columns) if columns else record
