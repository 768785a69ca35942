"""A source of a converted dataset's records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from shardprep.formats.columns.item_form import ItemForm
from shardprep.formats.dataset.collecting.collection import open_records
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.dataset.record_set import RecordSet
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.collected_end import CollectedEnd
from shardprep.formats.records.labels import SPACES
from shardprep.loaders.flow.core.checks import seed_of, within
from shardprep.loaders.flow.core.length import Length, exact
from shardprep.loaders.flow.core.node import Fetched, described
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.loader.loader import READ_AHEAD_BYTES
from shardprep.loaders.loader.options import place_of, plan_of
from shardprep.loaders.loader.shards_ahead.read_ahead import ReadAhead, ShardStream
from shardprep.loaders.loader.subset import Subset
from shardprep.loaders.loader.wanted_columns import WantedColumns
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.epoch_order import EpochOrder, Shuffle

from .flow_files import FlowFiles
from .item_fetch import ItemFetch, ItemKey
from .record_fetch import ColumnFetch, Key, RecordFetch

ANNOUNCED_RECORDS = 256  # records that the read-ahead thread is given at a time


@dataclass(frozen=True)
class FromDataset(Fetched):
    """The records in the order of the epoch with the pass's number. See :meth:`.Flow.from_dataset`.

    A record's key has the values of its index row. While keys are drawn in the order of the pass, a thread
    reads the shards ahead. Pickled as the dataset's path; workers that fetch need no index.
    """

    dataset: RecordSet
    plan: EpochPlan
    with_keys: bool
    columns: WantedColumns

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        shuffle: Shuffle | None,
        seed: int,
        label_space: str,
        with_keys: bool,
        columns: Sequence[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
    ) -> FromDataset:
        """Open the dataset; one of saved items gives these, unless ``columns`` are named.

        Raises ManifestDamaged, UnknownVersion, UsageError, OSError.
        """
        dataset = open_records(place_of(path), labels=label_space, cache=cache, cache_limit=cache_limit)
        if columns is None and _has_items(dataset):
            if with_keys or label_space != SPACES[0]:
                raise UsageError(
                    "has items of the form they were saved in: leave out with_keys and labels, or name the columns",
                    path=path,
                )
            cls = SavedItems
        plan = plan_of(
            Subset(dataset),
            shuffle=shuffle,
            seed=seed_of(seed),
            batch_size=getattr(shuffle, "partitions", 1),  # a flow's steps are items; it has no ranks
            rank=0,
            world_size=1,
            drop_last=False,
        )
        made = cls(dataset, plan, with_keys, WantedColumns.of(dataset, columns))
        CollectedEnd(made, dataset.close)
        return made

    @property
    def label(self) -> str:
        return "from_dataset"

    @property
    def description(self) -> str:
        return described(
            self,
            self.plan.dataset,
            f"shuffle={self.plan.shuffle}",
            f"seed={self.plan.seed}",
            f"with_keys={self.with_keys}",
            *((f"columns={self.columns.names}",) if self.columns.are_chosen else ()),
        )

    @property
    def length(self) -> Length:
        return exact(len(self.dataset))

    @property
    def never_change(self) -> bool:
        return True

    def fetch(self) -> RecordFetch:
        labels = tuple(self.dataset.space.mapping(self.dataset.label_space).tolist())
        files, parts = FlowFiles.of(self.dataset), self.columns.files_of(self.dataset)
        if not self.columns.are_chosen:
            return RecordFetch(parts, files, labels, self.with_keys)
        return ColumnFetch(parts, files, labels, self.with_keys, self.columns)

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Key]:
        order, shards = self.plan.order(now.number), self.plan.shards(now.number)
        numbers = within(numbers, self.length)
        if shards is None or not self.columns.with_image:
            yield from map(self._key, order.each(numbers))
            return
        stream = ShardStream.of(self.dataset.path, self.dataset.blocks, shards)
        with closing(ReadAhead(stream, budget=READ_AHEAD_BYTES)) as ahead:
            yield from map(self._key, order.each(_announced(ahead, order, numbers)))

    def _key(self, number: int) -> Key:
        key, label, shard, ordinal, _, crc32c, *_ = self.dataset.index[number].item()
        return shard, ordinal, key, label, crc32c, number


def _has_items(dataset: RecordSet) -> bool:
    """Whether it is one dataset of saved items; of a collection of such, a flow has the columns."""
    return isinstance(dataset, Dataset) and ItemForm.of_manifest(dataset.manifest.source) is not None


@dataclass(frozen=True)
class SavedItems(FromDataset):
    """The items of a dataset that :func:`.write_dataset` wrote, in the form in which they were given."""

    dataset: Dataset

    def fetch(self) -> ItemFetch:  # type: ignore[override]
        return ItemFetch.of(self.dataset)

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        order = self.plan.order(now.number)
        return map(self._place, order.each(within(numbers, self.length)))

    def _place(self, number: int) -> ItemKey:
        key, label, shard, ordinal, _, crc32c, *_ = self.dataset.index[number].item()
        return number, shard, ordinal, key, label, crc32c


def _announced(ahead: ReadAhead, order: EpochOrder, places: Iterable[int]) -> Iterator[int]:
    """Yield these places; announce further records while they are in order."""
    due = 0
    for place in places:
        if place == due:
            ahead.expect(order[due : due + ANNOUNCED_RECORDS])
            due += ANNOUNCED_RECORDS
        yield place
