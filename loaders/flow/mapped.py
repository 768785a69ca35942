"""What every ``map`` has, wherever its function is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ...formats.errors import UsageError
from .blame import Blame
from .functions import Function
from .length import Length
from .node import Node
from .per_item import PerItem
from .running import Pass
from .whole import seed_of


@dataclass(frozen=True)
class Mapped(PerItem):
    """``function(item)`` of each item, or ``function(item, rng)`` with ``random``.

    Results of None raise UsageError, or are left out with ``drop_none``.
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
    def length(self) -> Length:
        return self.source.length.filtered() if self.drop_none else self.source.length

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick and not self.drop_none

    @property
    def label(self) -> str:
        """What exceptions call this step."""
        return f"map({self.function.name})"

    def result(self, now: Pass, number: int, item: Any) -> Any:
        """Safe to call from several threads, if the function is."""
        with Blame(now, number, self.label):
            rng = (now.rng(self, self.seed, number),) if self.random else ()
            found = self.function(item, *rng)
            if found is None and not self.drop_none:
                raise UsageError(
                    f"{self.function.name} made None of item {number}: have it return something, "
                    "or leave such items out with drop_none=True"
                )
            return found

    def wanted(self, results: Iterator[Any]) -> Iterator[Any]:
        return filter(_is_something, results) if self.drop_none else results


def _is_something(result: Any) -> bool:
    return result is not None
