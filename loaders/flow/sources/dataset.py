"""A source of a converted dataset's records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.item_form import ItemForm
from shardprep.formats.columns.open_columns import OpenColumns
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.shard_cache import OpenShards
from shardprep.formats.dataset.dataset import Dataset, open_dataset
from shardprep.formats.records.labels import SPACES
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
from shardprep.loaders.transforms.columns import IMAGE

from .item_fetch import ItemFetch, ItemKey

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
    ) -> FromDataset:
        """Open the dataset, perhaps one of saved items. Raises ManifestDamaged, UnknownVersion, OSError."""
        dataset = open_dataset(user_path(path).absolute(), labels=label_space)
        is_plain = columns is None and not with_keys and label_space == SPACES[0]
        if is_plain and ItemForm.of_manifest(dataset.manifest.source) is not None:
            cls = SavedItems
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
            *((f"columns={self.columns.names}",) if self.columns.are_chosen else ()),
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
        return RecordFetch(
            self.dataset.path, manifest.container, manifest.shards, labels, self.with_keys, self.columns
        )

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Key]:
        order, shards = self.plan.order(now.number), self.plan.shards(now.number)
        numbers = within(numbers, self.length)
        if shards is None:
            yield from map(self._key, map(order.item, numbers))
            return
        stream = ShardStream.of(self.dataset.path, self.dataset.blocks, shards)
        with closing(ReadAhead(stream, budget=READ_AHEAD_BYTES)) as ahead:
            yield from map(self._key, _announced(ahead, order, numbers))

    def _key(self, number: int) -> Key:
        key, label, shard, ordinal, _, crc32c, *_ = self.dataset.index[number].item()
        return shard, ordinal, key, label, crc32c, number


@dataclass(frozen=True)
class SavedItems(FromDataset):
    """The items of a dataset that :func:`.write_dataset` wrote, in the form in which they were given."""

    def fetch(self) -> ItemFetch:  # type: ignore[override]
        return ItemFetch.of(self.dataset)

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        order = self.plan.order(now.number)
        return map(self._place, map(order.item, within(numbers, self.length)))

    def _place(self, number: int) -> ItemKey:
        key, label, shard, ordinal, _, crc32c, *_ = self.dataset.index[number].item()
        return number, shard, ordinal, key, label, crc32c


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
    wanted: WantedColumns

    @contextmanager
    def open(self) -> Iterator[Callable[[Key], tuple[Any, ...]]]:
        with (
            closing(OpenShards(self.folder, self.container, self.shards)) as shards,
            closing(OpenColumns(self.folder, self.wanted.entries, self.container)) as columns,
        ):
            yield partial(self._item, shards, columns)

    def _item(self, shards: OpenShards, columns: OpenColumns, key: Key) -> tuple[Any, ...]:
        shard, ordinal, name, label, _, number = key
        image = shards[shard].read(ordinal, indexed=key[2:5]).image if self.wanted.with_image else b""
        data: Any = image
        if self.wanted.are_chosen:
            place = RecordPlace(number, shard, ordinal, name)
            data = {
                column: image if column == IMAGE else columns[column].value(place)
                for column in self.wanted.names
            }
        rest = (data, self.label_map[label])
        return (name.decode(), *rest) if self.with_keys else rest
