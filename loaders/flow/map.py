"""Functions of each item, or of some of its components, called in the consumer's thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import count
from operator import is_not
from typing import Any, SupportsIndex

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.records.items import ColumnRecord
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import Record
from shardprep.formats.records.schema import RESERVED
from shardprep.formats.runtime.lazy import cached_property
from shardprep.formats.runtime.sizes import seed_of
from shardprep.loaders.batches.passes import ending
from shardprep.loaders.flow.node import InPlace, Length, Node, Step, numbered
from shardprep.loaders.flow.passes import ErrorNote, Function, PassContext
from shardprep.loaders.transforms.contract import ArraySpec, Transform, outputs_of


class PerItem(InPlace):
    """A step that makes each result from one item."""

    @abstractmethod
    def result(self, now: PassContext, number: int, item: Any) -> Any:
        """The result for the item with this number in this pass."""

    def wanted(self, results: Iterator[Any]) -> Iterator[Any]:
        """Return the results to yield: all of them."""
        return results

    @property
    def never_change(self) -> bool:
        return False  # the function may keep its result, and write to it

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        """Yield the results of all items, or of those with these numbers, without keeping references."""
        items, places = numbered(self, now, numbers)
        result = now.here.timed(self.label, lambda item, number: self.result(now, number, item))
        with ending(items):
            # a for loop would keep a reference to the item
            yield from self.wanted(map(result, items, places))


@dataclass(frozen=True)
class Mapped(PerItem):
    """``function(item)`` for each item, or ``function(item, rng)`` with ``random``. See :meth:`.Flow.map`."""

    source: Node
    function: Function
    _: KW_ONLY
    drop_none: bool
    random: bool
    seed: int
    ordered: bool = True

    title = "map({0.function.name})"
    facts = "drop_none={0.drop_none}, random={0.random}, seed={0.seed}"

    @property
    def length(self) -> Length:
        return self.source.length.filtered() if self.drop_none else self.source.length

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick and self.ordered and not self.drop_none

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
        return filter(partial(is_not, None), results) if self.drop_none else results


@dataclass(frozen=True)
class Map(Mapped):
    """A map that calls the function when the consumer asks for an item."""


@dataclass(frozen=True)
class Filter(Step):
    """The items for which ``function(item)`` is true."""

    source: Node
    function: Function

    title = "filter({0.function.name})"

    @property
    def length(self) -> Length:
        return self.source.length.filtered()

    def run(self, now: PassContext) -> Iterator[Any]:
        items, numbers = self.drawn(now), count()

        def is_wanted(item: Any) -> bool:
            with ErrorNote(now, next(numbers), self.label):
                return bool(self.function(item))

        with ending(items):
            yield from filter(now.here.timed(self.label, is_wanted), items)


LABEL = ArraySpec("label", (), "int64")


@dataclass(frozen=True)
class Transforming:
    """Turns (encoded image, label), or a dict of values, into (result of the transform, label)."""

    transform: Transform

    @property
    def outputs(self) -> tuple[ArraySpec, ...] | None:
        """The specs of a result; None if the transform does not declare its outputs."""
        declared = outputs_of(self.transform)
        return None if declared is None else (*declared, LABEL)

    def __call__(self, item: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        record = _record_of(item)
        made = self.transform(record, rng)
        return (*(made if isinstance(made, tuple) else (made,)), np.int64(record.label))


def _record_of(item: Any) -> Record:
    if isinstance(item, Record):
        return item
    if isinstance(item, tuple | list) and len(item) == 2:
        image, label = item
        item = (image if isinstance(image, dict) else {"image": image}) | {"label": label}
    if not isinstance(item, dict):
        raise UsageError(f"a transform needs items of (image, label), or dicts, not a {type(item).__name__}")
    label = item.get("label", UNLABELLED)
    if isinstance(label, str):
        raise UsageError("a transform needs labels as numbers, which from_dataset(path, columns=...) gives")
    columns = {name: value for name, value in item.items() if name not in RESERVED}
    record = Record(item.get("key", ""), int(label), item.get("image", b""))
    return ColumnRecord.of(record, columns) if columns else record


@dataclass(frozen=True)
class MapComponent(PerItem):
    """Items with ``component`` replaced by ``function`` of it."""

    source: Node
    function: Function
    component: int | str
    _: KW_ONLY
    random: bool
    seed: int

    title = "map_component({0.function.name}, {0.component!r})"

    def __post_init__(self) -> None:
        _check(self.component)
        seed_of(self.seed)

    def result(self, now: PassContext, number: int, item: Any) -> Any:
        with ErrorNote(now, number, self.label):
            value = _component(item, self.component, number)
            rng = (now.rng(self, self.seed, number),) if self.random else ()
            return _with(item, self.component, self.function(value, *rng))


@dataclass(frozen=True)
class Select(PerItem):
    """Some components of each item: numbers give a tuple, names a dict."""

    source: Node
    components: tuple[int | str, ...]

    def __post_init__(self) -> None:
        for component in self.components:
            _check(component)
        names = {component for component in self.components if isinstance(component, str)}
        if not self.components or (names and len(names) < len(self.components)):
            raise UsageError(f"select takes numbers or names, each once, not {self.components}")

    @cached_property
    def label(self) -> str:
        return f"select({', '.join(map(repr, self.components))})"

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def result(self, now: PassContext, number: int, item: Any) -> Any:
        found = (_component(item, component, number) for component in self.components)
        if isinstance(self.components[0], str):
            return dict(zip(self.components, found, strict=True))
        return tuple(found)


def _check(component: object) -> None:
    if isinstance(component, bool) or not isinstance(component, str | SupportsIndex):
        raise UsageError(f"a component is named by its number or its name, not {component!r}")


def _component(item: Any, component: Any, number: int) -> Any:
    """Return the item's component; negative numbers count from the end."""
    if isinstance(item, dict):
        found, there = component in item, ", ".join(map(str, item))
    elif isinstance(item, tuple | list):
        found = not isinstance(component, str) and -len(item) <= component < len(item)
        there = f"{len(item)}, numbered from 0"
    else:
        raise UsageError(
            f"item {number} is {type(item).__name__}, and only tuples, lists and dicts have components"
        )
    if not found:
        raise UsageError(f"item {number} has no component {component!r}: it has {there or 'none'}")
    return item[component]


def _with(item: Any, component: Any, value: Any) -> Any:
    """Return a new item of the same kind with the component replaced."""
    if isinstance(item, dict):
        return item | {component: value}
    if hasattr(item, "_fields"):
        return item._replace(**{item._fields[component]: value})
    parts = list(item)
    parts[component] = value
    return parts if isinstance(item, list) else tuple(parts)
