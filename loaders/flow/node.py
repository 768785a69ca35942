"""The nodes of a flow (sources and steps), their lengths, and the context and counters of their passes."""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import count, islice
from time import perf_counter
from types import UnionType
from typing import Any, ClassVar, Self, TypeVar, cast
from zlib import crc32

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.records.schema import is_integer
from shardprep.formats.runtime.owners import Closable, cached_property
from shardprep.formats.runtime.progress import accepts_arguments
from shardprep.loaders.batches.passes import ending
from shardprep.loaders.batches.pickling import PICKLING_ADVICE, loads, pickle_for_process
from shardprep.loaders.loader.stats import GroupTimes
from shardprep.loaders.order.rng import Purpose, keyed_bits


class LengthKind(Enum):
    """How much is known about a length."""

    EXACT = "exactly"
    AT_MOST = "at most"
    UNKNOWN = "unknown"
    INFINITE = "infinite"


@dataclass(frozen=True)
class Length:
    """The number of items in each pass of a flow.

    ``count`` is the exact number, or an upper bound unless ``is_certain``; ``math.inf`` if the pass never
    ends or, unless that is certain, for an unknown number. Compares by value; picklable.
    """

    count: float
    is_certain: bool = True

    @property
    def kind(self) -> LengthKind:
        """What ``count`` is: exact, an upper bound, unknown or infinite."""
        if math.isinf(self.count):
            return LengthKind.INFINITE if self.is_certain else LengthKind.UNKNOWN
        return LengthKind.EXACT if self.is_certain else LengthKind.AT_MOST

    @property
    def is_exact(self) -> bool:
        """Whether ``count`` is the exact number of items."""
        return self.kind is LengthKind.EXACT

    @property
    def is_infinite(self) -> bool:
        """Whether a pass never ends."""
        return self.kind is LengthKind.INFINITE

    @property
    def items(self) -> int:
        """The number of items, of an exact length."""
        return int(self.count)

    def filtered(self) -> Length:
        """The length after a step that may leave out any item."""
        return Length(self.count, is_certain=False)

    def times(self, passes: int) -> Length:
        """The length of ``passes`` passes, one after the other."""
        return Length(self.count * passes, self.is_certain) if passes else Length(0)

    def without(self, count: int) -> Length:
        """The length without the first ``count`` items."""
        return Length(max(0, self.count - count), self.is_certain)

    def batches(self, size: int, *, drop: bool) -> Length:
        """The number of batches of ``size`` items; ``drop`` leaves out an incomplete batch."""
        if math.isinf(self.count):
            return self
        return Length(self.count // size if drop else -(-self.count // size), self.is_certain)

    def then(self, other: Length) -> Length:
        """The combined length of both flows."""
        if self.is_infinite or other.is_infinite:
            return INFINITE
        return Length(self.count + other.count, self.is_certain and other.is_certain)

    def shortest(self, other: Length) -> Length:
        """The length of the shorter of both flows."""
        return Length(min(self.count, other.count), self.is_certain and other.is_certain)

    def __str__(self) -> str:
        return self.kind.value if math.isinf(self.count) else f"{self.kind.value} {int(self.count):,}"


UNKNOWN = Length(math.inf, is_certain=False)
INFINITE = Length(math.inf)


class Node(ABC):
    """A source, or a step over other nodes.

    Nodes are frozen dataclasses: immutable, picklable, without the state of a pass. ``sources`` are the nodes
    that a node draws from; a source has none. ``title`` and ``facts`` are format strings for :attr:`label`
    and :attr:`description`, with the node as ``{0}``; by default the class name, and the plain fields that
    differ from their own defaults: so a later option does not change the states of flows.
    """

    title: ClassVar[str] = ""
    facts: ClassVar[str | None] = None

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()

    @property
    @abstractmethod
    def length(self) -> Length:
        """The number of items of each pass."""

    def run(self, ctx: PassContext) -> Iterator[Any]:
        """Run one pass. Its items depend only on ``ctx.number``.

        Closing or dropping the iterator releases its resources. A step draws from its n-th source by
        ``self.sources[n].run(ctx.for_source(self, n))``.
        """
        return self.pick(ctx)

    @cached_property
    def label(self) -> str:
        """The name of this step or source in exceptions and stats: its method and distinguishing details."""
        return (self.title or type(self).__name__.lower()).format(self)

    @property
    def description(self) -> str:
        """A line of text with the options that items depend on, except functions and contents.

        It is the same whether the step runs in this thread, in other threads, or in processes.
        """
        values = ((f, getattr(self, f.name)) for f in fields(cast("Any", self)))
        own = ", ".join(f"{f.name}={v!r}" for f, v in values if _is_plain(v) and v != f.default)
        return f"{self.label.partition('(')[0]}({own if self.facts is None else self.facts.format(self)})"

    @property
    def can_pick(self) -> bool:
        """Whether :meth:`pick` can return any item by its number. Requires an exact length."""
        return False

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        """Yield the items that ``run`` yields at these positions, in the order of ``numbers``; None for all.

        ``numbers`` may be drawn some items ahead. They are given only if the node ``can_pick``.
        """
        raise NotImplementedError

    def check_numbers(self, numbers: Iterable[int] | None) -> Iterator[int]:
        """Yield the numbers, or all for None. Raises IndexError if out of range, UsageError if not whole."""
        count = self.length.items
        if numbers is None:
            yield from range(count)
            return
        for number in numbers:
            if type(number) is not int and not is_integer(number):
                raise UsageError(f"items are picked by whole numbers, not by {number!r}")
            if not 0 <= number < count:
                raise IndexError(f"item {number} of {count}")
            yield number

    @property
    def fetch(self) -> Fetch | None:
        """The maker of items from small :meth:`keys`, in any process; None if there is none."""
        return None

    def keys(self, ctx: PassContext, numbers: Iterable[int] | None) -> Iterator[Any]:
        """Yield the keys of the items that ``pick`` yields. They pickle to a few bytes."""
        raise NotImplementedError

    @property
    def items_never_change(self) -> bool:
        """Whether neither this nor an earlier step writes to an item after yielding it."""
        return False

    @property
    def makes_batches(self) -> bool:
        """Whether the last step that makes new items, rather than passing them on, makes batches."""
        return len(self.sources) == 1 and self.sources[0].makes_batches

    @property
    def height(self) -> int:
        """The length of the longest path to a source. Identifies the step in random streams."""
        return 1 + max((source.height for source in self.sources), default=-1)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and all nodes it draws from, from last to first."""
    yield node
    for source in node.sources:
        yield from walk(source)


def contains(node: Node, kind: type[Node] | UnionType) -> bool:
    """Whether the node, or any node it draws from, is of this kind."""
    return any(isinstance(each, kind) for each in walk(node))


class Step(Node):
    """A node with one source, in the field ``source``."""

    source: Node

    @property
    def sources(self) -> tuple[Node, ...]:
        return (self.source,)

    @property
    def length(self) -> Length:
        return self.source.length

    @property
    def items_never_change(self) -> bool:
        return self.source.items_never_change

    def number_items(
        self, ctx: PassContext, numbers: Iterable[int] | None = None
    ) -> tuple[Iterator[Any], Iterator[int]]:
        """Return iterators over the source's items (all, or those with these numbers) and over their numbers.

        Draw the item first, then its number. The caller ends the items (:func:`.passes.end`).
        """
        if numbers is None:
            return self.source.run(ctx.for_source(self)), count()
        drawn, places = share_numbers(numbers, 2)
        return self.source.pick(ctx.for_source(self), drawn), places


class PickableStep(Step):
    """A step that can pick its items if its source can."""

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick


Fetch = Callable[..., AbstractContextManager[Callable[[Any], Any]]]
"""Picklable function that opens a source in any process, as the context of a function from key to item."""


class KeyedSource(Node):
    """A source whose items are made from small keys (numbers, paths), also in the processes of a ``map``."""

    can_pick = items_never_change = True

    @property
    @abstractmethod
    def fetch(self) -> Fetch: ...

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        with ending(self.keys(ctx, numbers)) as keys, self.fetch() as item_of:
            yield from map(ctx.times.track(self.label, item_of), keys)


class Rearrangement(PickableStep):
    """A step that rearranges its source's items."""

    @abstractmethod
    def numbers(self, ctx: PassContext, places: Iterable[int]) -> Iterator[int]:
        """Yield the source's numbers of the items at these places. Called only if the source can pick."""

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        return self.source.pick(ctx.for_source(self), self.numbers(ctx, self.check_numbers(numbers)))

    @property
    def fetch(self) -> Fetch | None:
        return self.source.fetch

    def keys(self, ctx: PassContext, numbers: Iterable[int] | None) -> Iterator[Any]:
        return self.source.keys(ctx.for_source(self), self.numbers(ctx, self.check_numbers(numbers)))


def share_numbers(numbers: Iterable[int], readers: int) -> list[Iterator[int]]:
    """Return the same numbers for several readers, each drawing them in any thread and at its own rate."""
    source, lock = iter(numbers), threading.Lock()
    queues: list[deque[int]] = [deque() for _ in range(readers)]

    def advance(queue: deque[int]) -> bool:
        with lock:  # held by a reader that may wait long for a number
            for number in islice(source, 0 if queue else 1):
                for each in queues:
                    each.append(number)
            return bool(queue)

    def draw(queue: deque[int]) -> Iterator[int]:
        while queue or advance(queue):
            yield queue.popleft()

    return [draw(queue) for queue in queues]


NodeKey = tuple[tuple[int, ...], int]


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
        self.groups: dict[NodeKey, Any] = {}  # objects with read(), such as GroupTimes, by their steps
        self._first: float | None = None

    def count_draw(self, began: float, rows: int | None) -> None:
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

    ``values`` are the kept values by the key of their step; all passes share them. Concurrent passes never
    borrow the same object. No method takes a lock, because garbage collection may end a pass anywhere in the
    program: each change is one atomic call.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, deque[Closable]] = {}
        self.values: dict[NodeKey, Any] = {}
        self._closed = False

    @contextmanager
    def borrow(self, key: Hashable, make: Callable[[], ClosableT]) -> Iterator[ClosableT]:
        """Borrow a resource for this key, made by ``make`` if none is idle. An exception closes it."""
        # a forked process cannot use the objects of its parent
        idle = self._idle.setdefault((os.getpid(), key), deque())
        resource = None
        with suppress(IndexError):  # not the context of an error of `make`
            resource = cast("ClosableT", idle.pop())
        if resource is None:
            resource = make()
        is_usable = True
        try:
            yield resource
        except Exception:  # not an early end of the pass, or Ctrl-C
            is_usable = False
            raise
        finally:
            if is_usable:
                idle.append(resource)
            else:
                resource.close()
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
            resource = idle.pop()  # keep a reference: collecting some objects ends them in another thread
            resource.close()


@dataclass(frozen=True)
class PassContext:
    """The ``number``-th pass of a node; ``branch`` is the path to the node through combining steps.

    ``group`` has the counters of the thread that draws the node's items, None for the consumer's thread.
    """

    number: int = 0
    resources: PassResources = field(default_factory=PassResources)
    branch: tuple[int, ...] = ()
    meter: PassMeter = field(default_factory=PassMeter)
    group: GroupTimes | None = None

    def for_source(
        self, node: Node, source: int = 0, *, number: int | None = None, group: GroupTimes | None = None
    ) -> PassContext:
        """Return the context for a node's source, with its pass ``number`` and thread if these differ."""
        branch = (*self.branch, source) if len(node.sources) > 1 else self.branch
        number = self.number if number is None else number
        return PassContext(number, self.resources, branch, self.meter, group or self.group)

    @property
    def times(self) -> GroupTimes:
        """The counters of the thread that draws the node's items."""
        return self.group or self.meter.main

    def key_of(self, node: Node) -> NodeKey:
        """The key that identifies the node within the flow."""
        return self.branch, node.height

    def bits(self, node: Node, seed: int, item: int = 0) -> np.random.Philox:
        """Return the random stream of (seed, this pass, item number, step), at its start."""
        # unique for each branch: one byte for each number below 255, nine for the others
        parts = (bytes([n]) if n < 255 else b"\xff" + n.to_bytes(8, "little") for n in self.branch)
        branch = crc32(b"".join(parts)) if any(self.branch) else 0
        purpose = branch << 32 | node.height << 8 | Purpose.FLOW
        return keyed_bits(purpose, seed=seed, epoch=self.number, item=item)

    def rng(self, node: Node, seed: int, item: int = 0) -> np.random.Generator:
        return np.random.Generator(self.bits(node, seed, item))

    def annotate_errors(self, step: str, call: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Wrap ``call(item, number)`` to note the item in an exception: "In item 17 of pass 0, at map(load)".

        StopIteration becomes RuntimeError, because it would end the pass as if there were no more items.
        """

        def note(number: int) -> str:
            return f"In item {number} of pass {self.number}, at {step}"

        def call_annotated(item: Any, number: int) -> Any:
            try:
                return call(item, number)
            except StopIteration as error:
                stopped = RuntimeError(f"{step} raised StopIteration")
                stopped.add_note(note(number))
                raise stopped from error
            except Exception as error:
                error.add_note(note(number))
                raise

        return call_annotated


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
        function = cls(call)
        if not accepts_arguments(call, 2 if random else 1) and accepts_arguments(call, 1 if random else 2):
            wanted, remedy = ("(item, rng)", "leave out") if random else ("(item)", "add")
            raise UsageError(
                f"{function.name} cannot be called with {wanted}; {remedy} random=True, or change its parameters: a tuple is one item"
            )
        return function

    @property
    def name(self) -> str:
        return str(getattr(self.call, "__qualname__", type(self.call).__qualname__))

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            dumped = pickle_for_process(self.call)
        except Exception as error:
            raise UsageError(
                f"{self.name} cannot be sent to another process ({error}): {PICKLING_ADVICE}, or use threads"
            ) from error
        return (Function, (self.call,)) if dumped.by_name else (_load_function, (dumped.data,))


def _load_function(packed: bytes) -> Function:
    return Function(loads(packed))


def map_with_notes(
    call: Callable[[Any], Any], items: Iterator[Any], ctx: PassContext, numbers: Iterator[int], step: str
) -> Iterator[Any]:
    """Yield ``call(item)`` for each item, noted and timed. An item's number is drawn after the item."""
    return map(ctx.times.track(step, ctx.annotate_errors(step, lambda item, _: call(item))), items, numbers)
