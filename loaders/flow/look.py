"""What items look like, without their data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ..passes import end
from .node import Node, Step
from .numbered import numbered
from .running import Pass
from .whole import whole

MOST_PARTS = 16
MAX_DEPTH = 8


@dataclass(frozen=True)
class Print(Step):
    """Prints to stderr what the first ``items`` of each pass look like; all pass as they are."""

    source: Node
    items: int = 1

    def __post_init__(self) -> None:
        whole(self.items, "the number of items to print", least=0)

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def run(self, now: Pass) -> Iterator[Any]:
        return self._shown(now, None)

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        return self._shown(now, numbers) if self.can_pick else super().pick(now, numbers)

    def _shown(self, now: Pass, numbers: Iterable[int] | None) -> Iterator[Any]:
        items, places = numbered(self, now, numbers)
        seen = count()

        def shown(item: Any, number: int) -> Any:
            if next(seen) < self.items:
                print(f"Item {number} of pass {now.number}: {looks(item)}", file=sys.stderr)
            return item

        try:
            yield from map(shown, items, places)
        finally:
            end(items)


def looks(item: Any) -> str:
    """Type, shape, dtype and range of each part, one to a line; never raises an Exception."""
    try:
        return "\n".join(_lines(item, 1))
    except Exception as error:  # a stranger's class may raise anything, and looking must not end a pass
        return f"{type(item).__name__}, which cannot be looked at: {type(error).__name__}"


def _lines(part: Any, depth: int) -> Iterator[str]:
    yield _line(part)
    if not isinstance(part, Mapping | tuple | list):
        return
    most = MOST_PARTS if depth < MAX_DEPTH else 0
    named = part.items() if isinstance(part, Mapping) else enumerate(part)
    for name, value in islice(named, most):
        first, *rest = _lines(value, depth + 1)
        yield f"{'  ' * depth}{name}: {first}"
        yield from rest
    if len(part) > most:
        yield f"{'  ' * depth}..."


def _line(part: Any) -> str:
    kind = type(part).__name__
    if isinstance(part, np.ndarray):
        return f"{kind} {part.dtype} {list(part.shape)}{_range(part)}"
    if isinstance(part, Mapping | tuple | list):
        return f"{kind} of {len(part):,}"
    if isinstance(part, str):
        return f"{kind} of {len(part):,} characters"
    if isinstance(part, bytes | bytearray | memoryview):
        return f"{kind} of {memoryview(part).nbytes:,} bytes"
    return kind


def _range(array: npt.NDArray[Any]) -> str:
    """Least and greatest; NaN where there is one."""
    if array.size == 0 or array.dtype.kind not in "biuf":
        return ""
    return f", {array.min()} to {array.max()}"
