"""A converted dataset's records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...formats.dataset import Dataset, open_dataset
from ..assembly import plan_of
from ..epoch import EpochPlan
from ..loader import READ_AHEAD_BYTES
from ..order import Records, Shuffle
from ..read_ahead import ReadAhead, Stream
from .length import Length, exact
from .node import Fetched
from .running import Pass
from .whole import seed_of, within

TOLD = 256  # records at a time that the reader ahead is told of


@dataclass(frozen=True)
class FromDataset(Fetched):
    """The records in the order of the epoch that has the pass's number. See :meth:`.Flow.from_dataset`.

    Keys are record numbers; where they are asked for in the order of the pass, a thread reads the shards ahead.
    Picklable by its path.
    """

    dataset: Dataset
    plan: EpochPlan
    with_keys: bool

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        shuffle: Shuffle | None,
        seed: int,
        label_space: str,
        with_keys: bool,
    ) -> Self:
        """Opens the dataset. Raises ManifestDamaged, UnknownVersion, UsageError, OSError."""
        dataset = open_dataset(Path(path).absolute(), labels=label_space)
        plan = plan_of(
            dataset,
            shuffle=shuffle,
            seed=seed_of(seed),
            batch_size=1,
            rank=0,
            world_size=1,
            drop_last=False,
        )
        return cls(dataset, plan, with_keys)

    @property
    def length(self) -> Length:
        return exact(len(self.dataset))

    @property
    def never_change(self) -> bool:
        return True

    def fetch(self) -> RecordFetch:
        return RecordFetch(self.dataset, self.with_keys)

    def keys(self, now: Pass, numbers: Iterable[int]) -> Iterator[int]:
        order, shards = self.plan.order(now.number), self.plan.shards(now.number)
        numbers = within(numbers, self.length)
        if shards is None:
            yield from map(order.item, numbers)
            return
        stream = Stream.of(self.dataset.path, self.dataset.manifest.shards, shards)
        with closing(ReadAhead(stream, budget=READ_AHEAD_BYTES)) as ahead:
            yield from _told(ahead, order, numbers)


def _told(ahead: ReadAhead, order: Records, numbers: Iterable[int]) -> Iterator[int]:
    """The records at these places of the order; the reader is told of those that come next, if in order."""
    due = 0
    for number in numbers:
        if number == due:
            ahead.expect(order[due : due + TOLD])
            due += TOLD
        yield int(order[number])


@dataclass(frozen=True)
class RecordFetch:
    """Reads records by their numbers. Picklable by the dataset's path."""

    dataset: Dataset
    with_keys: bool

    @contextmanager
    def open(self) -> Iterator[Callable[[int], tuple[Any, ...]]]:
        yield self._item

    def _item(self, number: int) -> tuple[Any, ...]:
        record = self.dataset[number]
        return (record.key, record.image, record.label) if self.with_keys else (record.image, record.label)
