"""A source of a converted dataset's records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from shardprep.formats.columns.box_table import BoxTable, OpenBoxes
from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.open_columns import OpenColumns
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.shard_cache import OpenShards
from shardprep.formats.dataset.dataset import Dataset, open_dataset
from shardprep.formats.dataset.table_checks import box_table
from shardprep.formats.records.record import Record
from shardprep.formats.system.user_path import user_path
from shardprep.loaders.flow.core.checks import seed_of, within
from shardprep.loaders.flow.core.length import Length, exact
from shardprep.loaders.flow.core.node import Fetched, described
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.loader.loader import READ_AHEAD_BYTES
from shardprep.loaders.loader.options import plan_of
from shardprep.loaders.loader.read_ahead import ReadAhead, ShardStream
from shardprep.loaders.loader.subset import Subset
from shardprep.loaders.loader.wanted_columns import WantedColumns
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.epoch_order import Records, Shuffle
from shardprep.loaders.transforms.columns import AsColumns

Key = tuple[int, int, bytes, int, int, int]  # shard, ordinal; key, label, CRC-32C from the index; number

ANNOUNCED_RECORDS = 256  # records that the read-ahead thread is given at a time


@dataclass(frozen=True)
class FromDataset(Fetched):
    """The records in the order of the epoch with the pass's number. See :meth:`.Flow.from_dataset`.

    A record's key has the values of its index row. While keys are drawn in the order of the pass, a thread
    reads the shards ahead. Pickled as the dataset's path; workers that fetch need no index.
    """

    dataset: Dataset
    plan: EpochPlan
    with_keys: bool
    wanted: WantedColumns

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
    ) -> Self:
        """Open the dataset. Raises ManifestDamaged, UnknownVersion, UsageError, OSError."""
        dataset = open_dataset(user_path(path).absolute(), labels=label_space)
        plan = plan_of(
            Subset(dataset),
            shuffle=shuffle,
            seed=seed_of(seed),
            batch_size=1,
            rank=0,
            world_size=1,
            drop_last=False,
        )
        return cls(dataset, plan, with_keys, WantedColumns.of(dataset.manifest, columns))

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
            *((f"columns={self.wanted.names}",) if self.wanted.are_chosen else ()),
        )

    @property
    def length(self) -> Length:
        return exact(len(self.dataset))

    @property
    def never_change(self) -> bool:
        return True

    def fetch(self) -> RecordFetch:
        manifest = self.dataset.manifest
        labels = tuple(manifest.labels.mapping(self.dataset.label_space).tolist())
        if not self.wanted.are_chosen:
            return RecordFetch(self.dataset.path, manifest.container, manifest.shards, labels, self.with_keys)
        return ColumnFetch(
            self.dataset.path,
            manifest.container,
            manifest.shards,
            labels,
            self.with_keys,
            self.wanted,
            box_table(self.dataset.path, manifest, self.dataset.label_space) if self.wanted.boxes else None,
        )

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Key]:
        order, shards = self.plan.order(now.number), self.plan.shards(now.number)
        numbers = within(numbers, self.length)
        if shards is None or not self.wanted.with_image:
            yield from map(self._key, map(order.item, numbers))
            return
        stream = ShardStream.of(self.dataset.path, self.dataset.manifest.shards, shards)
        with closing(ReadAhead(stream, budget=READ_AHEAD_BYTES)) as ahead:
            yield from map(self._key, _announced(ahead, order, numbers))

    def _key(self, number: int) -> Key:
        key, label, shard, ordinal, _, crc32c, *_ = self.dataset.index[number].item()
        return shard, ordinal, key, label, crc32c, number


def _announced(ahead: ReadAhead, order: Records, numbers: Iterable[int]) -> Iterator[int]:
    """Yield the record numbers at these places; announce further records while places are in order."""
    due = 0
    for number in numbers:
        if number == due:
            ahead.expect(order[due : due + ANNOUNCED_RECORDS])
            due += ANNOUNCED_RECORDS
        yield int(order[number])


@dataclass(frozen=True)
class RecordFetch:
    """Reads records by their keys, without the index. Pickles to few bytes."""

    folder: Path
    container: str
    shards: tuple[FileEntry, ...]
    label_map: tuple[int, ...]
    with_keys: bool

    @contextmanager
    def open(self) -> Iterator[Callable[[Key], Any]]:
        with closing(OpenShards(self.folder, self.container, self.shards)) as shards:
            yield partial(self._item, shards)

    def _item(self, shards: OpenShards, key: Key) -> tuple[Any, ...]:
        record = shards[key[0]].read(key[1], indexed=key[2:5])
        label = self.label_map[record.label]
        return (record.key, record.image, label) if self.with_keys else (record.image, label)


@dataclass(frozen=True)
class ColumnFetch(RecordFetch):
    """Reads records with their columns, as dicts. Pickles to few bytes for each column."""

    wanted: WantedColumns
    boxes: BoxTable | None

    @contextmanager
    def open(self) -> Iterator[Callable[[Key], Any]]:
        others = OpenBoxes(self.boxes).columns(self.wanted.boxes) if self.boxes else {}
        with (
            closing(OpenShards(self.folder, self.container, self.shards)) as shards,
            closing(OpenColumns(self.folder, self.wanted.entries, self.container, others)) as columns,
        ):
            yield partial(self._values, shards, columns)

    def _values(self, shards: OpenShards, columns: OpenColumns, key: Key) -> dict[str, Any]:
        shard, ordinal, name, label, _, number = key
        record = Record(name.decode(), self.label_map[label], b"")
        if self.wanted.with_image:
            record = record._replace(image=shards[shard].read(ordinal, indexed=key[2:5]).image)
        found = columns.of(record, RecordPlace(number, shard, ordinal, name))
        values = AsColumns(self.wanted.names).values(found)
        return {"key": record.key, **values, "label": record.label}
