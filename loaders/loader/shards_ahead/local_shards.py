"""The shards of a dataset on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from shardprep.loaders.engine.run import BatchRequest, Plan


@dataclass(frozen=True)
class ShardLevels:
    """Where an epoch is: of its ``total`` shards ``begun`` are or were used, ``ahead`` more are there."""

    total: int = 0
    begun: int = 0
    ahead: int = 0

    @property
    def missing(self) -> int:
        """The shards of the epoch that are still to come."""
        return self.total - self.begun - self.ahead


@dataclass(frozen=True)
class StorageCounts:
    """What came from a remote dataset since the loader was made; all 0 for a dataset on this machine.

    ``downloaded`` files with ``downloaded_bytes`` were downloaded by this process; ``received_bytes`` also
    count what is on its way, and what had to be asked for again. ``hits`` were in the cache already, or came
    by another process. ``waited`` are the seconds in which no batch could be begun because its shards were
    not there; ``waited_first`` are those before the first batches of epochs. ``shards`` says where the
    downloads are now.
    """

    downloaded: int = 0
    downloaded_bytes: int = 0
    received_bytes: int = 0
    hits: int = 0
    waited: float = 0.0
    waited_first: float = 0.0
    shards: ShardLevels = field(default_factory=ShardLevels)

    @property
    def limiting(self) -> float:
        """The seconds that batches waited while an epoch ran."""
        return self.waited - self.waited_first

    def since(self, before: StorageCounts) -> StorageCounts:
        """Return what was counted after ``before``."""
        counts = {
            name: count - getattr(before, name) for name, count in vars(self).items() if name != "shards"
        }
        return replace(self, **counts)


class BatchFeed(Protocol):
    """The batches of one epoch, each of which begins when its shards are there."""

    def plans(self, request: BatchRequest, step: int) -> Iterator[Plan]:
        """Yield the request of a step's batch when its shards are there, and NotReady before that."""
        ...


class LocalShards:
    """Shards that are there: every batch begins at once."""

    def epoch(self, number: int, start: int) -> AbstractContextManager[BatchFeed]:
        """The context of the batches of an epoch that continues at ``start``."""
        return nullcontext(self)

    def plans(self, request: BatchRequest, step: int) -> Iterator[Plan]:
        """Yield the request."""
        yield request

    def held(self, shards: Iterable[int]) -> AbstractContextManager[object]:
        """The context in which the files of these shards are there, for whatever reads besides batches."""
        return nullcontext()

    @property
    def counts(self) -> StorageCounts:
        """What was downloaded, found in the cache, and waited for."""
        return StorageCounts()

    def close(self) -> None:
        """End what downloads. Idempotent."""
