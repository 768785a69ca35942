"""Reads the records of a converted dataset by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.open_columns import ChainedColumns, PartFiles
from shardprep.formats.containers.shard_cache import Bring, OpenShards
from shardprep.formats.records.record import Record
from shardprep.loaders.loader.wanted_columns import WantedColumns
from shardprep.loaders.transforms.columns import IMAGE

from .flow_files import FlowFiles

Key = tuple[int, int, bytes, int, int, int]  # shard, ordinal; key, label, CRC-32C from the index; number


@dataclass(frozen=True)
class RecordFetch:
    """Reads records by their keys, without the index. Pickles to few bytes."""

    parts: tuple[PartFiles, ...]
    files: FlowFiles
    label_map: tuple[int, ...]
    with_keys: bool

    @contextmanager
    def open(self) -> Iterator[Callable[[Key], Any]]:
        with self.files.open() as bring, closing(self.open_shards(bring)) as shards:
            yield partial(self._item, shards)

    def open_shards(self, bring: Bring) -> OpenShards:
        """Return the shards of all parts, each brought before it is opened."""
        return OpenShards.of_parts(((part.folder, part.container, part.shards) for part in self.parts), bring)

    def _item(self, shards: OpenShards, key: Key) -> tuple[Any, ...]:
        record = shards[key[0]].read(key[1], indexed=key[2:5])
        label = self.label_map[record.label]
        return (record.key, record.image, label) if self.with_keys else (record.image, label)


@dataclass(frozen=True)
class ColumnFetch(RecordFetch):
    """Reads records with a dict of columns in place of the image. Pickles to few bytes for each column."""

    wanted: WantedColumns

    @contextmanager
    def open(self) -> Iterator[Callable[[Key], Any]]:
        with (
            self.files.open() as bring,
            closing(self.open_shards(bring)) as shards,
            closing(ChainedColumns(self.parts, bring)) as columns,
        ):
            yield partial(self._values, shards, columns)

    def _values(self, shards: OpenShards, columns: ChainedColumns, key: Key) -> tuple[Any, ...]:
        shard, ordinal, name, label, _, number = key
        record = Record(name.decode(), self.label_map[label], b"")
        if self.wanted.with_image:
            record = record._replace(image=shards[shard].read(ordinal, indexed=key[2:5]).image)
        found = columns.of(record, RecordPlace(number, shard, ordinal, name))
        values = {each: found.image if each == IMAGE else found.columns[each] for each in self.wanted.names}
        return (record.key, values, record.label) if self.with_keys else (values, record.label)
