"""Sources of the records of a converted dataset, or of the items saved in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from shardprep.formats.errors import ManifestDamaged, UsageError
from shardprep.formats.records.record import SPACES, ItemForm
from shardprep.formats.runtime.files import Closable, CollectedEnd, Owned
from shardprep.formats.shards.columns import OpenRecords, PartFiles, RecordPlace
from shardprep.formats.shards.dataset import Dataset, RecordSet
from shardprep.formats.shards.read import Address, FileEntry
from shardprep.formats.storage.cache import CachedDataset, FileCache, FileSource
from shardprep.loaders.flow.node import Fetch, Fetched, Length, within
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.loader.ahead import Prefetcher, ReadAhead, ShardFiles, end_downloads, reading_ahead
from shardprep.loaders.loader.loader import READ_AHEAD_BYTES
from shardprep.loaders.loader.options import WantedColumns
from shardprep.loaders.loader.work import blocks_read
from shardprep.loaders.order.epoch import EpochOrder, EpochPlan
from shardprep.loaders.order.shard_uses import shard_uses
from shardprep.loaders.transforms.contract import IMAGE

ItemKey = tuple[int, int, int, Address]  # number, shard, ordinal; address


@dataclass(frozen=True)
class RecordFetch:
    """Reads records by key, without the index. Pickles to a few bytes, plus some per column.

    With ``names``, a dict of these replaces the image. Saved items have a ``form``.
    """

    parts: tuple[PartFiles, ...]
    files: FileSource
    labels: tuple[Any, ...]
    names: tuple[str, ...] | None = None
    with_keys: bool = False
    form: ItemForm | None = None

    @contextmanager
    def open(self, cache: FileCache | None = None) -> Iterator[Callable[[ItemKey], Any]]:
        with self.files.open(cache) as files, closing(OpenRecords(self.parts, files)) as records:
            form = self.form
            yield partial(self._record, records) if form is None else partial(self._saved, records, form)

    def _record(self, records: OpenRecords, key: ItemKey) -> tuple[Any, ...]:
        number, shard, ordinal, address = key
        label = self.labels[address[1]]
        image: Any = (
            records.image(shard, ordinal, address) if self.names is None or IMAGE in self.names else b""
        )
        if self.names is not None:
            record = records.record(RecordPlace(number, shard, ordinal, address[0]), label, image)
            image = {each: image if each == IMAGE else record.columns[each] for each in self.names}
        return (address[0].decode(), image, label) if self.with_keys else (image, label)

    def _saved(self, records: OpenRecords, form: ItemForm, key: ItemKey) -> Any:
        number, shard, ordinal, address = key
        image = records.image(shard, ordinal, address) if IMAGE in form.own else b""
        place = RecordPlace(number, shard, ordinal, address[0])
        values = [records.value(name, place) for name in form.columns]
        return form.item(address[0].decode(), self.labels[address[1]], image, values)


class PassDownloads(Owned, Closable):
    """Downloads ahead of a flow's passes, one pass after the other. :meth:`close` cancels them."""

    def __init__(self, source: FileSource) -> None:
        self._cache = source.opened()
        self._prefetcher = Prefetcher(self._cache, ahead=0)
        self._end = CollectedEnd(self, partial(end_downloads, self._cache, self._prefetcher))
        self._prefetcher.start()

    def close(self) -> None:
        self._end()

    @contextmanager
    def ahead(self, files: Sequence[FileEntry]) -> Iterator[FileCache]:
        """Context of the cache for a pass over these files; downloads begun before its end finish."""
        self._prefetcher.follow(files)
        try:
            yield self._cache
        finally:
            if self.made_here:  # after a fork, a thread that was not copied may hold the lock
                self._prefetcher.follow(())


ANNOUNCED_RECORDS = 256  # records passed to the read-ahead thread at a time


@dataclass(frozen=True)
class FromDataset(Fetched):
    """The records of a dataset; pass n has the order of epoch n. Keys contain rows of the index."""

    dataset: RecordSet
    plan: EpochPlan
    with_keys: bool
    columns: WantedColumns

    title = "from_dataset"
    facts = "{0.plan.dataset}, shuffle={0.plan.shuffle}, seed={0.plan.seed}, with_keys={0.with_keys}"

    @classmethod
    def of(
        cls, dataset: RecordSet, plan: EpochPlan, columns: Sequence[str] | None, *, with_keys: bool
    ) -> FromDataset:
        """Return the source of the records or, unless ``columns`` is given, of the items saved in them."""
        manifest = dataset.manifest if isinstance(dataset, Dataset) else None  # a collection has columns
        if columns is None and manifest and ItemForm.of_manifest(manifest.source) is not None:
            if with_keys or dataset.label_space != SPACES[0]:
                raise UsageError(
                    "has items in the form they were saved in: leave out with_keys and labels, or name the columns",
                    path=dataset.location,
                )
            cls = SavedItems
        made = cls(dataset, plan, with_keys, WantedColumns.of(dataset, columns))
        CollectedEnd(made, dataset.close)
        return made

    @property
    def description(self) -> str:
        columns = f", columns={self.columns.names}" if self.columns.are_chosen else ""
        return super().description.removesuffix(")") + columns + ")"

    @property
    def length(self) -> Length:
        return Length(len(self.dataset))

    @property
    def fetch(self) -> Fetch:
        labels = tuple(self.dataset.space.mapping(self.dataset.label_space).tolist())
        files, parts = FileSource.of(self.dataset), self.columns.files_of(self.dataset)
        names = self.columns.names if self.columns.are_chosen else None
        return RecordFetch(parts, files, labels, names, self.with_keys).open

    def pick(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        with self._ahead(now, numbers) as (keys, cache), self.fetch(cache) as item_of:
            yield from map(now.here.timed(self.label, item_of), keys)

    def keys(self, now: PassContext, numbers: Iterable[int] | None) -> Iterator[Any]:
        with self._ahead(now, numbers) as (keys, _):
            yield from keys

    @contextmanager
    def _ahead(
        self, now: PassContext, numbers: Iterable[int] | None
    ) -> Iterator[tuple[Iterator[ItemKey], FileCache | None]]:
        """Context of a pass's keys, with their shards downloaded or read ahead, and the open cache."""
        shards, order = self.plan.shards(now.number), self.plan.order(now.number)
        places: Iterable[int] = within(numbers, self.length)
        parts = self.columns.files_of(self.dataset)
        if isinstance(self.dataset, CachedDataset):
            files = ShardFiles(parts, with_image=self.columns.with_image)
            places = iter(places)
            first = list(islice(places, 1))  # where a resumed pass continues
            start = sum(first) // self.plan.batch_size * self.plan.batch_size
            uses = shard_uses(self.plan, now.number, start=start)
            make = partial(PassDownloads, FileSource.of(self.dataset))
            with (
                now.kept.borrowed((now.place(self), "downloads"), make) as downloads,
                downloads.ahead(files.of(uses.shards.tolist())) as cache,
            ):
                yield map(self._key, order.each(chain(first, places))), cache
        else:
            blocks = blocks_read(self.dataset, parts, with_image=self.columns.with_image)
            with reading_ahead(self.dataset.path, blocks, shards, budget=READ_AHEAD_BYTES) as ahead:
                if ahead:
                    places = _announced(ahead, order, places)
                yield map(self._key, order.each(places)), None

    def _key(self, number: int) -> ItemKey:
        key, label, shard, ordinal, length, crc32c, *_, offset = self.dataset.index[number].item()
        return number, shard, ordinal, (key, label, crc32c, offset, length)


@dataclass(frozen=True)
class SavedItems(FromDataset):
    """The items of a dataset that :func:`.write_dataset` wrote, in their original form."""

    dataset: Dataset

    @property
    def fetch(self) -> Fetch:
        """The reader of the items. Raises ManifestDamaged if their form and the columns differ."""
        form, dataset = ItemForm.of_manifest(self.dataset.manifest.source), self.dataset
        if form is None or form.columns != dataset.manifest.schema.names:
            raise ManifestDamaged("describes its items by columns that it does not have", path=dataset.path)
        (part,) = dataset.parts
        parts = (part.files(dataset.label_space, form.columns, ()),)
        labels: tuple[Any, ...] = dataset.classes
        if not form.is_named:
            number_of = {name: number for number, name in enumerate(form.classes)}
            labels = tuple(number_of.get(name, place) for place, name in enumerate(labels))
        return RecordFetch(parts, FileSource.of(dataset), (*labels, -1), form=form).open


def _announced(ahead: list[ReadAhead], order: EpochOrder, places: Iterable[int]) -> Iterator[int]:
    """Yield these places, announcing records ahead while the places are consecutive."""
    due = 0
    for place in places:
        if place == due:
            for each in ahead:
                each.expect(order[due : due + ANNOUNCED_RECORDS])
            due += ANNOUNCED_RECORDS
        yield place
