"""A pass under way: its number, its place in the flow, and what is kept from one pass to the next."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from zlib import crc32

import numpy as np

from ..rng import flow_bits

if TYPE_CHECKING:
    from .node import Node

Place = tuple[tuple[int, ...], int]


class Closeable(Protocol):
    """What is kept between passes."""

    def close(self) -> None: ...


T = TypeVar("T", bound=Closeable)


class Kept:
    """What the steps of one flow keep between its passes: worker processes, caches. Thread-safe.

    Two passes at once never have the same: who borrows gets what nobody uses, or something new. What is shared
    is one for all of them.
    """

    def __init__(self) -> None:
        # reentrant, for a pass that is collected as garbage gives back in the middle of anything
        self._lock = threading.RLock()
        self._idle: dict[Hashable, list[Closeable]] = {}
        self._shared: dict[Place, Closeable] = {}
        self._closed = False

    @contextmanager
    def borrowed(self, place: Hashable, make: Callable[[], T]) -> Iterator[T]:
        """Something made by ``make`` for this place, for as long as the context lasts; an exception ends it for good."""
        place = os.getpid(), place  # what a process made is of no use to its forked copy
        with self._lock:
            idle = self._idle.setdefault(place, [])
            found = cast("T", idle.pop()) if idle else None
        found = make() if found is None else found
        try:
            yield found
        except Exception:
            found.close()
            raise
        except BaseException:  # a pass that was left, or Ctrl-C
            self._give_back(place, found)
            raise
        self._give_back(place, found)

    def shared(self, place: Place, make: Callable[[], T]) -> T:
        """The only thing made by ``make`` for this place, which does nothing that takes time. Itself thread-safe."""
        with self._lock:
            if place not in self._shared:
                self._shared[place] = make()
            return cast("T", self._shared[place])

    def _give_back(self, place: Hashable, found: Closeable) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(place, []).append(found)
                return
        found.close()

    def close(self) -> None:
        """Close what nobody uses now, and the rest as soon as it is given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
            shared, self._shared = self._shared, {}
        for found in (*chain.from_iterable(idle.values()), *shared.values()):
            found.close()


@dataclass(frozen=True)
class Stream:
    """The randomness of one step, in any process: picklable."""

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
class Pass:
    """The ``number``-th pass of a node; ``branch`` says which way leads to it where steps have several sources."""

    number: int = 0
    kept: Kept = field(default_factory=Kept)
    branch: tuple[int, ...] = ()

    def of(self, node: Node, source: int = 0, *, number: int | None = None) -> Pass:
        """The pass of a node's source; ``number`` where that runs through other passes than the node does."""
        branch = (*self.branch, source) if len(node.sources) > 1 else self.branch
        return Pass(self.number if number is None else number, self.kept, branch)

    def place(self, node: Node) -> Place:
        """What tells the node from all others of the flow."""
        return self.branch, node.height

    def bits(self, node: Node, seed: int, item: int = 0) -> np.random.Philox:
        """The random stream of (seed, this pass, the item's number, this step), at its start."""
        return self.stream(node, seed).bits(self.number, item)

    def rng(self, node: Node, seed: int, item: int = 0) -> np.random.Generator:
        """A generator over :meth:`bits`."""
        return self.stream(node, seed).rng(self.number, item)

    def stream(self, node: Node, seed: int) -> Stream:
        """The step's randomness, to be sent elsewhere."""
        return Stream(seed, node.height, crc32(_packed(self.branch)) if any(self.branch) else 0)


def _packed(branch: tuple[int, ...]) -> bytes:
    """One byte for each turn that is below 255, as of nearly all; no two branches have the same."""
    return b"".join(bytes([turn]) if turn < 255 else b"\xff" + turn.to_bytes(8, "little") for turn in branch)
