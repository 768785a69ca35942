"""Functions of each item, called where the flow is drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..passes import end
from .blame import Blame
from .functions import Function
from .length import Length
from .mapped import Mapped
from .node import Node, Step
from .running import Pass


@dataclass(frozen=True)
class Map(Mapped):
    """Each item when it is asked for, one after the other."""


@dataclass(frozen=True)
class Filter(Step):
    """The items for which ``function(item)`` is true."""

    source: Node
    function: Function

    @property
    def length(self) -> Length:
        return self.source.length.filtered()

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def run(self, now: Pass) -> Iterator[Any]:
        items, numbers = self.drawn(now), count()

        def is_wanted(item: Any) -> bool:
            with Blame(now, next(numbers), f"filter({self.function.name})"):
                return bool(self.function(item))

        try:
            yield from filter(is_wanted, items)
        finally:
            end(items)
