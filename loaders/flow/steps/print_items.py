"""Descriptions of items, without their data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.printable import printable
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.checks import checked_int
from shardprep.loaders.flow.core.node import Node, Step, described
from shardprep.loaders.flow.core.numbering import numbered
from shardprep.loaders.flow.core.pass_context import PassContext

MAX_PARTS = 16
MAX_DEPTH = 8


@dataclass(frozen=True)
class Print(Step):
    """Prints descriptions of the first ``items`` items of each pass to stderr; all items pass unchanged."""

    source: Node
    items: int = 1

    def __post_init__(self) -> None:
        checked_int(self.items, "the number of items to print", least=0)

    @property
    def description(self) -> str:
        return described(self)

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def run(self, now: PassContext) -> Iterator[Any]:
        return self._shown(now, None)

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        return self._shown(now, numbers) if self.can_pick else super().pick(now, numbers)

    def _shown(self, now: PassContext, numbers: Iterable[int] | None) -> Iterator[Any]:
        items, places = numbered(self, now, numbers)
        seen = count()

        def shown(item: Any, number: int) -> Any:
            if next(seen) < self.items:
                print(f"Item {number} of pass {now.number}: {describe(item)}", file=sys.stderr)
            return item

        try:
            yield from map(shown, items, places)
        finally:
            end(items)


def describe(item: Any) -> str:
    """Return one printable line for each part: type, shape, dtype and range. Never raises an Exception."""
    try:
        return "\n".join(map(printable, _lines(item, 1)))
    except Exception as error:  # a user's class may raise anything, and printing must not end a pass
        return f"{type(item).__name__}, which cannot be described: {type(error).__name__}"


def _lines(part: Any, depth: int) -> Iterator[str]:
    yield _line(part)
    if not isinstance(part, Mapping | tuple | list):
        return
    most = MAX_PARTS if depth < MAX_DEPTH else 0
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
    """Minimum and maximum; NaN where the array has one."""
    if array.size == 0 or array.dtype.kind not in "biuf":
        return ""
    return f", {array.min()} to {array.max()}"
