"""Items together with their numbers, in a whole pass or picked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from .node import Step
from .running import Pass


class Asked:
    """Numbers on their way down to a source, each kept until its item has come up.

    Iterate it once, in any thread and as far ahead as need be; ``again`` gives the same numbers, once they were
    drawn.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = numbers
        self._ahead: deque[int] = deque()

    def __iter__(self) -> Iterator[int]:
        for number in self._numbers:
            self._ahead.append(number)
            yield number

    @property
    def again(self) -> Iterator[int]:
        return iter(self._ahead.popleft, None)


def numbered(
    step: Step, now: Pass, numbers: Iterable[int] | None = None
) -> tuple[Iterator[Any], Iterator[int]]:
    """What a step draws from its source: all items, or those of ``numbers``; and the number of each.

    Draw the item first, then its number. The items are to be ended by who drew them (:func:`.passes.end`).
    """
    if numbers is None:
        return step.drawn(now), count()
    asked = Asked(numbers)
    return step.source.pick(now.of(step), asked), asked.again
