"""Steps on the components of items that are tuples, lists or dicts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, SupportsIndex

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.core.checks import seed_of
from shardprep.loaders.flow.core.node import Node
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.flow.core.user_function import ErrorNote, Function

from .per_item import PerItem


@dataclass(frozen=True)
class MapComponent(PerItem):
    """Each item as a new one, with ``component`` replaced by ``function`` of it."""

    source: Node
    function: Function
    component: int | str
    _: KW_ONLY
    random: bool
    seed: int

    def __post_init__(self) -> None:
        _check(self.component)
        seed_of(self.seed)

    @property
    def label(self) -> str:
        return f"map_component({self.function.name}, {self.component!r})"

    def result(self, now: PassContext, number: int, item: Any) -> Any:
        with ErrorNote(now, number, self.label):
            value = _component(item, self.component, number)
            rng = (now.rng(self, self.seed, number),) if self.random else ()
            return _with(item, self.component, self.function(value, *rng))


@dataclass(frozen=True)
class Select(PerItem):
    """These components of each item: numbers give a tuple, names a dict."""

    source: Node
    components: tuple[int | str, ...]

    def __post_init__(self) -> None:
        for component in self.components:
            _check(component)
        names = {component for component in self.components if isinstance(component, str)}
        if not self.components or (names and len(names) < len(self.components)):
            raise UsageError(f"select takes numbers, or names, of which each once, not {self.components}")

    @property
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
