"""What all steps over several flows have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ..passes import end
from .length import Length
from .node import Node
from .running import Pass


@dataclass(frozen=True)
class Combined(Node):
    """A step over several flows."""

    nodes: tuple[Node, ...]

    @property
    def sources(self) -> tuple[Node, ...]:
        return self.nodes

    @property
    def length(self) -> Length:
        return reduce(Length.then, (node.length for node in self.nodes))

    @property
    def never_change(self) -> bool:
        return all(node.never_change for node in self.nodes)

    def begun(self, now: Pass) -> list[Iterator[Any]]:
        """A pass of each."""
        return [node.run(now.of(self, n)) for n, node in enumerate(self.nodes)]


@contextmanager
def ended(passes: list[Iterator[Any]]) -> Iterator[None]:
    """They all end with the context."""
    with ExitStack() as opened:
        for items in passes:
            opened.callback(end, items)
        yield
