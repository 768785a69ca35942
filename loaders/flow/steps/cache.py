"""A step that keeps the items of the first complete pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.convert import converted
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.node import Node, Step
from shardprep.loaders.flow.core.pass_context import PassContext


@dataclass(frozen=True)
class Cache(Step):
    """The items of the first complete pass, in all later passes. See :meth:`.Flow.cache`.

    A pass of exact length is complete with its last item, another pass when the consumer reaches its end.
    Arrays are copied once, unless the source never changes them.
    """

    source: Node

    def __post_init__(self) -> None:
        if self.source.length.is_infinite:
            raise UsageError("an infinite flow cannot be kept in memory; use take(n) before")

    @property
    def never_change(self) -> bool:
        return True

    def run(self, now: PassContext) -> Iterator[Any]:
        store = now.kept.shared(now.place(self), _Store)
        yield from self._first(now, store) if store.items is None else map(read_only, store.items)

    def _first(self, now: PassContext, store: _Store) -> Iterator[Any]:
        kept: list[Any] = []
        length, never_change = self.source.length, self.source.never_change

        def keep(item: Any) -> Any:
            kept.append(item if never_change else _copied(item))
            if length.is_exact and len(kept) == length.items:
                store.fill(kept)
            return read_only(kept[-1])

        items = self.drawn(now)
        try:
            yield from map(keep, items)
        finally:
            end(items)
        store.fill(kept)


class _Store:
    """The items of the pass that was complete first; None before. Thread-safe."""

    def __init__(self) -> None:
        self.items: list[Any] | None = None
        self._lock = threading.Lock()

    def fill(self, items: list[Any]) -> None:
        with self._lock:
            if self.items is None:
                self.items = items

    def close(self) -> None:
        with self._lock:
            self.items = None


def read_only(item: Any) -> Any:
    """Return the item in new tuples, lists and dicts, with read-only views of its arrays."""
    return converted(item, _view)


def _view(part: Any) -> Any:
    if not isinstance(part, np.ndarray):
        return part
    view = part.view()
    view.flags.writeable = False
    return view


_copied = partial(converted, convert=lambda part: part.copy() if isinstance(part, np.ndarray) else part)
