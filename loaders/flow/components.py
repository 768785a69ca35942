"""Steps on the components of items that are tuples, lists or dicts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, SupportsIndex

from ...formats.errors import UsageError
from .blame import Blame
from .functions import Function
from .node import Node
from .per_item import PerItem
from .running import Pass
from .whole import seed_of


@dataclass(frozen=True)
class MapComponent(PerItem):
    """Each item anew, with ``function`` of its ``component`` in place of that one; the others as they are."""

    source: Node
    function: Function
    component: int | str
    _: KW_ONLY
    random: bool
    seed: int

    def __post_init__(self) -> None:
        _check(self.component)
        seed_of(self.seed)

    def result(self, now: Pass, number: int, item: Any) -> Any:
        with Blame(now, number, f"map_component({self.function.name}, {self.component!r})"):
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
    def never_change(self) -> bool:
        return self.source.never_change

    def result(self, now: Pass, number: int, item: Any) -> Any:
        found = (_component(item, component, number) for component in self.components)
        if isinstance(self.components[0], str):
            return dict(zip(self.components, found, strict=True))
        return tuple(found)


def _check(component: object) -> None:
    if isinstance(component, bool) or not isinstance(component, str | SupportsIndex):
        raise UsageError(f"a component is named by its number or its name, not {component!r}")


def _component(item: Any, component: Any, number: int) -> Any:
    """The item's component, numbers counting from the end if they are negative."""
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
    """The item with another component, as a new one of its kind."""
    if isinstance(item, dict):
        return item | {component: value}
    parts = list(item)
    parts[component] = value
    if isinstance(item, list):
        return parts
    return type(item)._make(parts) if hasattr(item, "_make") else tuple(parts)
