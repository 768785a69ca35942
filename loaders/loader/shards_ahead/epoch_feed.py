"""One run of a loader over a remote dataset: each batch begins when its shards are in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from shardprep.formats.dataset.remote.caching.held import Held
from shardprep.formats.errors import UsageError
from shardprep.formats.system.owned import Owned
from shardprep.loaders.engine.run import BatchRequest, NotReady, Plan
from shardprep.loaders.order.shard_uses import ShardUses

from .held_shards import HeldShards, abandon

GRACE_S = 0.02  # shards that are there are held before


class EpochFeed(Owned):
    """The shards of an epoch's batches, held from before their items are drawn until the workers have ended.

    ``hold`` begins to hold shards, ``waited`` is given the seconds in which no batch was in the works, and
    whether none was before, and ``over`` each step that has ended. A forked
    copy of the process gets UsageError.
    """

    def __init__(
        self,
        uses: ShardUses,
        *,
        hold: Callable[[Iterable[int]], Future[Held]],
        waited: Callable[[float, bool], None],
        over: Callable[[int], None],
    ) -> None:
        self._uses = uses
        self._hold, self._waited, self._over = hold, waited, over
        self._last: HeldShards | None = None
        self._pending: Future[Held] | None = None
        self._in_flight: deque[HeldShards] = deque()

    def plans(self, request: BatchRequest, step: int) -> Iterator[Plan]:
        """Yield the request of a step's batch once its shards are held, and NotReady before that."""
        self._refuse_copied()
        shards = frozenset(self._uses.at(step).tolist())
        held = self._last
        while held is None or not shards <= held.shards or not held.take():
            pending = self._pending = self._hold(shards)
            wait([pending], GRACE_S)
            while not pending.done():
                yield NotReady(partial(self._wait, pending))
            held = self._last = HeldShards(shards, pending.result())
            self._pending = None
        self._in_flight.append(held)
        yield replace(request, filled=partial(self._filled, step))

    def _wait(self, pending: Future[Held]) -> None:
        self._refuse_copied()
        began = perf_counter()
        wait([pending])
        self._waited(perf_counter() - began, self._last is None)

    def _filled(self, step: int) -> None:
        """Let go what a batch had; batches end in the order of their requests."""
        self._refuse_copied()
        with suppress(IndexError):  # closed in another thread
            self._in_flight.popleft().give_back()
            self._over(step)

    def _refuse_copied(self) -> None:
        """Raise UsageError in a forked copy of the process, which has no threads that hold shards."""
        if not self.made_here:
            raise UsageError("this Loader belongs to the process that forked this one; make another")

    def close(self) -> None:
        """Let go what is held for batches that do not come any more."""
        if self._pending is not None:
            abandon(self._pending)
        with suppress(IndexError):
            while True:
                self._in_flight.popleft().give_back()
