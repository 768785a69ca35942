"""The context and counters of a flow's running pass, and functions that are sent to processes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast
from zlib import crc32

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.files import Closable
from shardprep.formats.runtime.progress import takes
from shardprep.loaders.batches.pickling import TO_SEND, dumps_elsewhere, loads
from shardprep.loaders.loader.stats import GroupTimes
from shardprep.loaders.order.rng import Purpose, keyed_bits

if TYPE_CHECKING:
    from shardprep.loaders.flow.node import Node

NodePlace = tuple[tuple[int, ...], int]
T = TypeVar("T")


class PassMeter:
    """Counters of one pass. One thread draws its items; any thread may read.

    ``timed`` counts the ``rows`` after the first item. ``elapsed`` is the seconds since the first item,
    ``drawing`` the part of them spent in the flow, ``warming`` the seconds before. ``main`` starts at the
    first item.
    """

    def __init__(self) -> None:
        self.items = self.rows = self.timed = 0
        self.is_over = False
        self.elapsed = self.drawing = self.warming = 0.0
        self.main = GroupTimes("main", "main")
        self.groups: dict[NodePlace, Any] = {}  # objects with read(), such as GroupTimes
        self._first: float | None = None

    def group(self, at: NodePlace, new: T) -> T:
        """Return the counters of the step at this place, from an earlier run in this pass or ``new``."""
        found: T = self.groups.setdefault(at, new)
        return found

    def drew(self, began: float, rows: int | None) -> None:
        """Count a draw that began at ``began`` and returned an item of ``rows`` rows; None for no item."""
        now = perf_counter()
        if self._first is not None:
            self.elapsed, self.drawing = now - self._first, self.drawing + now - began
            self.timed += rows or 0
        elif rows is not None:
            self._first, self.warming = now, now - began
            self.main.restart()
        if rows is not None:
            self.items, self.rows = self.items + 1, self.rows + rows


ClosableT = TypeVar("ClosableT", bound=Closable)


class PassResources(Closable):
    """What the steps of a flow keep between passes: worker processes, caches. Thread-safe.

    ``values`` are the kept values by the place of their step; all passes share them. Concurrent passes never
    borrow the same object. No method takes a lock, because garbage collection may end a pass anywhere in the
    program: each change is one atomic call.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, deque[Closable]] = {}
        self.values: dict[NodePlace, Any] = {}
        self._closed = False

    @contextmanager
    def borrowed(self, place: Hashable, make: Callable[[], ClosableT]) -> Iterator[ClosableT]:
        """Borrow an object for this place, made by ``make`` if none is idle. An exception closes it."""
        own = os.getpid(), place  # a forked process cannot use the objects of its parent
        idle = self._idle.setdefault(own, deque())
        try:
            found = cast("ClosableT", idle.pop())
        except IndexError:
            found = make()
        is_usable = True
        try:
            yield found
        except Exception:  # not an early end of the pass, or Ctrl-C
            is_usable = False
            raise
        finally:
            if is_usable:
                idle.append(found)
            else:
                found.close()
            if self._closed:  # perhaps during this call
                _close_all(idle)

    def close(self) -> None:
        """Close idle objects and drop kept values; borrowed objects are closed when returned. Idempotent."""
        self._closed = True
        for idle in list(self._idle.values()):
            _close_all(idle)
        self.values.clear()


def _close_all(idle: deque[Closable]) -> None:
    with suppress(IndexError):
        while True:
            found = idle.pop()  # keep a reference: collecting some objects ends them in another thread
            found.close()


@dataclass(frozen=True)
class PassContext:
    """The ``number``-th pass of a node; ``branch`` is the path to the node through combining steps.

    ``group`` has the counters of the thread that draws the node's items, None for the consumer's thread.
    """

    number: int = 0
    kept: PassResources = field(default_factory=PassResources)
    branch: tuple[int, ...] = ()
    meter: PassMeter = field(default_factory=PassMeter)
    group: GroupTimes | None = None

    def of(
        self, node: Node, source: int = 0, *, number: int | None = None, group: GroupTimes | None = None
    ) -> PassContext:
        """Return the context for a node's source, with its pass ``number`` and thread if these differ."""
        branch = (*self.branch, source) if len(node.sources) > 1 else self.branch
        number = self.number if number is None else number
        return PassContext(number, self.kept, branch, self.meter, group or self.group)

    @property
    def here(self) -> GroupTimes:
        """The counters of the thread that draws the node's items."""
        return self.group or self.meter.main

    def place(self, node: Node) -> NodePlace:
        """The key that identifies the node within the flow."""
        return self.branch, node.height

    def bits(self, node: Node, seed: int, item: int = 0) -> np.random.Philox:
        """Return the random stream of (seed, this pass, item number, step), at its start."""
        branch = crc32(_packed(self.branch)) if any(self.branch) else 0
        purpose = branch << 32 | node.height << 8 | Purpose.FLOW
        return keyed_bits(purpose, seed=seed, epoch=self.number, item=item)

    def rng(self, node: Node, seed: int, item: int = 0) -> np.random.Generator:
        """Return a generator over :meth:`bits`."""
        return np.random.Generator(self.bits(node, seed, item))

    def noted(self, step: str, call: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Wrap ``call(item, number)`` to note the item in an exception: "In item 17 of pass 0, at map(load)".

        StopIteration becomes RuntimeError, because it would end the pass as if there were no more items.
        """

        def note(number: int) -> str:
            return f"In item {number} of pass {self.number}, at {step}"

        def called(item: Any, number: int) -> Any:
            try:
                return call(item, number)
            except StopIteration as error:
                stopped = RuntimeError(f"{step} raised StopIteration")
                stopped.add_note(note(number))
                raise stopped from error
            except Exception as error:
                error.add_note(note(number))
                raise

        return called


def _packed(branch: tuple[int, ...]) -> bytes:
    """Return a unique encoding of the branch: one byte for each number below 255, nine for the others."""
    return b"".join(bytes([n]) if n < 255 else b"\xff" + n.to_bytes(8, "little") for n in branch)


@dataclass(frozen=True)
class Function:
    """A user's function, made picklable: lambdas, closures and the script's functions by cloudpickle.

    Raises UsageError for an object that is not callable, and when pickling one that cannot be sent.
    """

    call: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.call):
            raise UsageError(f"a function is needed here, not {self.call!r}; omit the () after its name")

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    @classmethod
    def of_item(cls, call: Callable[..., Any], *, random: bool) -> Self:
        """Wrap a function of an item, or of (item, rng). Raises UsageError if it takes the other form."""
        made = cls(call)
        if not takes(call, 2 if random else 1) and takes(call, 1 if random else 2):
            wanted, remedy = ("(item, rng)", "leave out") if random else ("(item)", "add")
            raise UsageError(
                f"{made.name} cannot be called with {wanted}; {remedy} random=True, or change its parameters: a tuple is one item"
            )
        return made

    @property
    def name(self) -> str:
        return str(getattr(self.call, "__qualname__", type(self.call).__qualname__))

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            dumped = dumps_elsewhere(self.call)
        except Exception as error:
            raise UsageError(
                f"{self.name} cannot be sent to another process ({error}): {TO_SEND}, or use threads"
            ) from error
        return (Function, (self.call,)) if dumped.by_name else (_unpacked, (dumped.data,))


def _unpacked(packed: bytes) -> Function:
    return Function(loads(packed))


def map_with_notes(
    call: Callable[[Any], Any], items: Iterator[Any], now: PassContext, numbers: Iterator[int], step: str
) -> Iterator[Any]:
    """Yield ``call(item)`` for each item, noted and timed. An item's number is drawn after the item."""
    return map(now.here.timed(step, now.noted(step, lambda item, _: call(item))), items, numbers)
