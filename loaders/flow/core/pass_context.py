"""The context of a running pass: its number, its place in the flow, and what is kept between passes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast
from zlib import crc32

import numpy as np

from shardprep.formats.system.owned import Owned
from shardprep.loaders.order.rng import flow_bits

from .meter import GroupMeter, NodePlace, PassMeter


class NodePosition(Protocol):
    """The attributes of a node that give its place in the flow."""

    @property
    def sources(self) -> tuple[Any, ...]: ...

    @property
    def height(self) -> int: ...


class Closeable(Protocol):
    """An object that is kept between passes."""

    def close(self) -> None: ...


T = TypeVar("T", bound=Closeable)


class PassResources(Owned):
    """The objects that the steps of one flow keep between passes: worker processes, caches. Thread-safe.

    Concurrent passes never borrow the same object: a pass gets an idle one or a new one. A shared object is
    the same for all passes. No method takes a lock, because the garbage collector may end a pass, and so
    return its objects, at any point of the program. Instead, each change is a single call of a built-in,
    which is atomic.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, deque[Closeable]] = {}
        self._shared: dict[NodePlace, Closeable] = {}
        self._closed = False

    @contextmanager
    def borrowed(self, place: Hashable, make: Callable[[], T]) -> Iterator[T]:
        """Borrow an object made by ``make`` for this place. An exception in the context closes it."""
        idle = self._idle.setdefault(
            (os.getpid(), place), deque()
        )  # a forked process cannot use the objects of its parent
        idling = cast("T | None", _taken(idle))
        found = make() if idling is None else idling
        try:
            yield found
        except Exception:
            found.close()
            raise
        except BaseException:  # the pass was closed early, or Ctrl-C
            self._give_back(idle, found)
            raise
        self._give_back(idle, found)

    def shared(self, place: NodePlace, make: Callable[[], T]) -> T:
        """The one object for this place. ``make`` must be fast, and the object thread-safe."""
        found = self._shared.get(place)
        return cast("T", self._shared.setdefault(place, make()) if found is None else found)

    def _give_back(self, idle: deque[Closeable], found: Closeable) -> None:
        idle.append(found)
        if self._closed:  # perhaps during this call
            self._end(idle)

    def close(self) -> None:
        """Close the idle and shared objects; borrowed ones are closed when they are returned. Idempotent."""
        self._closed = True
        for idle in list(self._idle.values()):
            self._end(idle)
        while self._shared:
            _, found = self._shared.popitem()
            found.close()

    def _end(self, idle: deque[Closeable]) -> None:
        while (found := _taken(idle)) is not None:
            found.close()


def _taken(idle: deque[Closeable]) -> Closeable | None:
    try:
        return idle.pop()
    except IndexError:
        return None


@dataclass(frozen=True)
class StepRandom:
    """The random streams of one step. Picklable."""

    seed: int
    step: int
    branch: int

    def bits(self, pass_number: int, item: int = 0) -> np.random.Philox:
        """The random stream of (seed, pass, the item's number, this step), at its start."""
        return flow_bits(self.seed, pass_number=pass_number, item=item, step=self.step, branch=self.branch)

    def rng(self, pass_number: int, item: int = 0) -> np.random.Generator:
        """A generator over :meth:`bits`."""
        return np.random.Generator(self.bits(pass_number, item))


@dataclass(frozen=True)
class PassContext:
    """The ``number``-th pass of a node; ``branch`` is the path to it through steps with several sources.

    ``meter`` counts the pass; ``group`` is the thread in which the node's items are drawn, None for the
    consumer's.
    """

    number: int = 0
    kept: PassResources = field(default_factory=PassResources)
    branch: tuple[int, ...] = ()
    meter: PassMeter = field(default_factory=PassMeter)
    group: GroupMeter | None = None

    def of(
        self,
        node: NodePosition,
        source: int = 0,
        *,
        number: int | None = None,
        group: GroupMeter | None = None,
    ) -> PassContext:
        """The context for a node's source.

        ``number`` is its pass where that differs from the node's, ``group`` its thread likewise.
        """
        branch = (*self.branch, source) if len(node.sources) > 1 else self.branch
        number = self.number if number is None else number
        return PassContext(number, self.kept, branch, self.meter, group or self.group)

    @property
    def here(self) -> GroupMeter:
        """The counters of the thread in which the node's items are drawn."""
        return self.group or self.meter.main

    def place(self, node: NodePosition) -> NodePlace:
        """The key that identifies the node within the flow."""
        return self.branch, node.height

    def bits(self, node: NodePosition, seed: int, item: int = 0) -> np.random.Philox:
        """The random stream of (seed, this pass, the item's number, this step), at its start."""
        return self.stream(node, seed).bits(self.number, item)

    def rng(self, node: NodePosition, seed: int, item: int = 0) -> np.random.Generator:
        """A generator over :meth:`bits`."""
        return self.stream(node, seed).rng(self.number, item)

    def stream(self, node: NodePosition, seed: int) -> StepRandom:
        """The step's random streams, to send to another process."""
        return StepRandom(seed, node.height, crc32(_packed(self.branch)) if any(self.branch) else 0)


def _packed(branch: tuple[int, ...]) -> bytes:
    """Return a unique encoding of the branch: one byte for each number below 255, nine for the others."""
    return b"".join(bytes([n]) if n < 255 else b"\xff" + n.to_bytes(8, "little") for n in branch)
