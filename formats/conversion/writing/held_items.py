"""The items of one shard, encoded and held in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardprep.formats.containers.container import Extent
from shardprep.formats.conversion.building.build_shard import ShardJob
from shardprep.formats.processes.portable import unpacked
from shardprep.formats.sources.listing.source import ByteReader, Entries, entry_dtype

from .item_coder import EncodedItem, ItemCoder
from .numbered_items import NumberedItems


@dataclass(frozen=True)
class HeldItems(ByteReader):
    """Reader of encoded items; an entry's ``mtime_ns`` is its place among them, its offset its number."""

    items: tuple[EncodedItem, ...] = ()

    def read(self, entry: np.void) -> bytes:
        return self._of(entry).image

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        return self._of(entry).values

    def _of(self, entry: np.void) -> EncodedItem:
        return self.items[int(entry["mtime_ns"])]

    def where(self, entry: np.void) -> str:
        return f"item {entry['offset']}"

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is open."""


def held_job(job: ShardJob, items: Sequence[EncodedItem], numbers: Sequence[int]) -> ShardJob:
    """Return the job with these items, which have these numbers, in place of what stood for them."""
    entries = entries_of(items, numbers)
    key_bytes = entries.dtype["key"].itemsize
    size = sum(len(item.image) + sum(map(len, item.values)) for item in items)
    shard = replace(job.shard, extent=Extent(len(items), size, key_bytes))
    return replace(job, entries=entries, key_bytes=key_bytes, shard=shard, reader=HeldItems(tuple(items)))


def entries_of(items: Sequence[EncodedItem], numbers: Sequence[int]) -> Entries:
    """Return the rows of a listing for items with these numbers."""
    entries = np.zeros(len(items), entry_dtype(max(len(item.key) for item in items), 1))
    entries["key"] = [item.key for item in items]
    entries["label"] = [item.label for item in items]
    entries["length"] = [item.size for item in items]
    entries["offset"] = numbers
    entries["mtime_ns"] = np.arange(len(items))
    return entries


@dataclass(frozen=True)
class FetchedItems(ByteReader):
    """What a worker fetches a shard's items with: ``source``, packed, and their encoding."""

    source: bytes
    coder: ItemCoder

    def items(self, numbers: Sequence[int]) -> list[EncodedItem]:
        """Return the encoded items of these numbers. Raises BadItem, and what making an item raises."""
        source: NumberedItems = unpacked(self.source)
        return encoded(self.coder, source, numbers)

    def read(self, entry: np.void) -> bytes:
        return self.items([int(entry["offset"])])[0].image

    def where(self, entry: np.void) -> str:
        return f"item {entry['offset']}"

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is open."""


def encoded(coder: ItemCoder, source: NumberedItems, numbers: Sequence[int]) -> list[EncodedItem]:
    """Return the encoded items of these numbers."""
    found = source.pick(iter(numbers))
    return [coder.encode(number, item) for number, item in zip(numbers, found, strict=True)]


class FetchingJob(ShardJob):
    """A job that fetches its items in the worker. ``reader`` is a :class:`FetchedItems`."""

    def loaded(self) -> ShardJob:
        numbers = self.entries["offset"].tolist()
        reader = self.reader
        if not isinstance(reader, FetchedItems):
            return self
        plain = ShardJob(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        return held_job(plain, reader.items(numbers), numbers)
