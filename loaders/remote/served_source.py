"""Sources that make batches by the numbers of their steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.system.owned import Owned
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.loader.epoch_loader import EpochLoader
from shardprep.loaders.loader.replaying.identity import digest_of
from shardprep.loaders.order.epoch import LoadedStep

from .messages import Delivery
from .source_terms import UNKNOWN, SourceTerms

MAX_IN_FLIGHT = 4  # batches; fewer leave the wire idle at times, more exceed the caches: measured with 10 MB


@dataclass(frozen=True)
class Ended:
    """The pass has no more than ``total`` steps."""

    total: int


class Served(Owned, ABC):
    """Makes any step of any pass. Equal ``terms`` mean equal batches. Not thread-safe.

    ``max_in_flight`` batches may still be being sent while the next one is made.
    """

    terms: SourceTerms
    max_in_flight: int

    @abstractmethod
    def make(self, pass_number: int, steps: Iterable[int]) -> Iterator[Delivery | Ended]:
        """Yield the batches of ``steps``, in that order; ``steps`` may be drawn some steps ahead.

        Ends with Ended where the pass has no such step. Closing the iterator ends the work.
        """

    def close(self) -> None:
        """End the work under way; the source itself stays open."""


def served(source: EpochLoader | Flow, identity: str | None) -> Served:
    """Return the source as Served. Raises UsageError for a source that cannot be served."""
    if identity == "":
        raise UsageError("identity='' would be equal for all sources; leave it out, or give a text")
    if isinstance(source, EpochLoader):
        return ServedLoader(source, identity)
    if isinstance(source, Flow) and source.parts > 1:
        return ServedParts(source, identity)
    if isinstance(source, Flow):
        return ServedFlow(source, identity)
    raise UsageError(
        f"a Loader or a Flow can be served, not a {type(source).__name__}; Flow.from_callable takes a function "
        "that returns any iterable"
    )


class ServedLoader(Served):
    """The batches of a Loader; its receipts count its records."""

    def __init__(self, loader: EpochLoader, identity: str | None) -> None:
        own = loader.identity if identity is None else {"identity": identity}
        state = loader.state_dict()
        if state["world_size"] != 1:
            raise UsageError("only a Loader of the whole dataset can be served: give it rank=0, world_size=1")
        self._loader = loader
        self.max_in_flight = min(MAX_IN_FLIGHT, loader.most_held - 1)
        facts = own | {"dataset": state["dataset"]}
        self.terms = SourceTerms(facts, loader.batches_per_epoch, len(loader.records), picks=True)

    def make(self, pass_number: int, steps: Iterable[int]) -> Iterator[Delivery | Ended]:
        with closing(self._loader.steps(pass_number, steps)) as loaded:  # type: ignore[type-var]
            yield from map(_delivery, loaded)


def _delivery(loaded: LoadedStep) -> Delivery:
    return Delivery(loaded.batch, loaded.delivered, loaded.skipped, loaded.left_out)


class ServedFlow(Served):
    """The items of a Flow, each a batch; its receipts count them."""

    def __init__(self, flow: Flow, identity: str | None) -> None:
        self._flow = flow
        self._pass_number, self._position = -1, 0
        self._items: Iterator[Any] = iter(())
        facts = {"identity": digest_of(flow) if identity is None else identity}
        items = flow.length.items if flow.length.is_exact else UNKNOWN
        self.terms = SourceTerms(facts, items, items, picks=flow.can_pick and items != UNKNOWN)
        self.max_in_flight = MAX_IN_FLIGHT if flow.batches_never_change else 0

    def make(self, pass_number: int, steps: Iterable[int]) -> Iterator[Delivery | Ended]:
        return self._picked(pass_number, steps) if self.terms.picks else self._in_order(pass_number, steps)

    def _picked(self, pass_number: int, steps: Iterable[int]) -> Iterator[Delivery | Ended]:
        drawn = deque[int]()
        with closing(self._flow.pick(pass_number, _noted(steps, drawn))) as items:  # type: ignore[type-var]
            yield from map(lambda item: _item(item, drawn.popleft()), items)  # noqa: C417 - a loop would keep a batch

    def _in_order(self, pass_number: int, steps: Iterable[int]) -> Iterator[Delivery | Ended]:
        for step in steps:
            if held := self._item_at(pass_number, step):
                yield _item(held.pop(), step)
            else:
                yield Ended(self._position)
                return

    def _item_at(self, pass_number: int, step: int) -> list[Any]:
        """Return the item in a list, which is empty where the pass has ended before it."""
        if pass_number != self._pass_number or step < self._position:
            self.close()
            self._pass_number, self._position = pass_number, 0
            self._items = self._flow.at_pass(pass_number)
        while held := list(islice(self._items, 1)):
            self._position += 1
            if self._position > step:
                break
        return held

    def close(self) -> None:
        items, self._items = self._items, iter(())
        self._pass_number = -1
        end(items)


class ServedParts(Served):
    """The items of a flow in parts: item i of part p is step i * parts + p. Parts stay open during a pass."""

    def __init__(self, flow: Flow, identity: str | None) -> None:
        self._flow = flow
        self._pass_number = -1
        self._parts: dict[int, OpenPart] = {}
        facts = {"identity": digest_of(flow) if identity is None else identity}
        self.terms = SourceTerms(facts, UNKNOWN, UNKNOWN, picks=False, parts=flow.parts)
        self.max_in_flight = MAX_IN_FLIGHT if flow.batches_never_change else 0

    def make(self, pass_number: int, steps: Iterable[int]) -> Iterator[Delivery | Ended]:
        if pass_number != self._pass_number:
            self.close()
            self._pass_number = pass_number
        for step in steps:
            number, part = divmod(step, self._flow.parts)
            opened = self._opened(part, number)
            if held := opened.item(number):
                yield _item(held.pop(), step)
            else:
                yield Ended(opened.due * self._flow.parts + part)
                return

    def _opened(self, part: int, number: int) -> OpenPart:
        """Return the part at or before this item; one that is beyond it begins anew."""
        found = self._parts.get(part)
        if found is None or number < found.due:
            if found is not None:
                found.close()
            found = self._parts[part] = OpenPart(self._flow.part(self._pass_number, part))
        return found

    def close(self) -> None:
        while self._parts:
            self._parts.popitem()[1].close()
        self._pass_number = -1


class OpenPart:
    """The items of a part from item ``due`` on."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.due = 0
        self._items = items

    def item(self, number: int) -> list[Any]:
        """Return this item in a list, which is empty where the part has ended before it."""
        while held := list(islice(self._items, 1)):
            self.due += 1
            if self.due > number:
                break
        return held

    def close(self) -> None:
        end(self._items)


def _item(item: Any, step: int) -> Delivery:
    return Delivery(item, np.array([step], np.int64))


def _noted(steps: Iterable[int], drawn: deque[int]) -> Iterator[int]:
    for step in steps:
        drawn.append(step)
        yield step
