"""Sources of a flow: sequences, iterables, functions, files, datasets, parts and made-up items."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from shardprep.formats.conversion.save import SequenceItems
from shardprep.formats.errors import ManifestDamaged, UsageError
from shardprep.formats.images.decode import cv2
from shardprep.formats.records.record import SPACES, ItemForm
from shardprep.formats.runtime.owners import Closable, Finalizer, Owner, cached_property
from shardprep.formats.runtime.progress import check_flags, check_int, check_seconds, check_seed, is_sequence
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.columns import OpenRecords, PartFiles, RecordPlace
from shardprep.formats.shards.dataset import Dataset, RecordSet
from shardprep.formats.shards.read import Address, FileEntry
from shardprep.formats.sources.source import IMAGE_SUFFIXES
from shardprep.formats.sources.trees import FolderWalk
from shardprep.formats.storage.cache import CachedDataset, FileCache, FileSource
from shardprep.loaders.batches.passes import Passes, check_items, ending, ending_all
from shardprep.loaders.batches.pickling import ALIGNMENT, allocate_aligned
from shardprep.loaders.flow.node import UNKNOWN, Fetch, Function, KeyedSource, Length, Node, PassContext
from shardprep.loaders.loader.ahead import Prefetcher, ReadAhead, ShardFiles, end_downloads, reading_ahead
from shardprep.loaders.loader.loader import READ_AHEAD_BYTES
from shardprep.loaders.loader.stats import FAKE
from shardprep.loaders.loader.work import WantedColumns, blocks_to_read
from shardprep.loaders.order.epoch import EpochOrder, EpochPlan, shard_uses
from shardprep.loaders.order.parts import permutation
from shardprep.loaders.transforms.contract import IMAGE


def from_iterable(items: Any) -> Node:
    """Return the source for these items. Raises UsageError for an iterator or an object without items."""
    if isinstance(items, Iterator):
        raise UsageError(
            f"a {type(items).__name__} is an iterator, which has only one pass: give Flow.from_callable a "
            "function that returns a new one (such as a generator function), or Flow.from_iterable a list"
        )
    numbered = SequenceItems.of(items)
    return FromIterable(Passes(items)) if numbered is None else FromSequence(numbered.sequence)


@dataclass(frozen=True)
class FromSequence(Node):
    """The elements ``items[0]`` to ``items[len(items) - 1]``; for an array, its rows."""

    items: Any

    title = "from_iterable({0.items.__class__.__name__})"
    facts = "{0.length}"
    can_pick = True

    @property
    def length(self) -> Length:
        return Length(len(self.items))

    @property
    def items_never_change(self) -> bool:
        return bool(getattr(self.items, "batches_never_change", False))

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        item_of = ctx.times.track(self.label, SequenceItems(self.items).item)
        yield from map(item_of, self.check_numbers(numbers))


@dataclass(frozen=True)
class FromIterable(Node):
    """The items of a source that is iterated once per pass: a set, a Loader, another library's data."""

    passes: Passes

    title = "from_iterable({0.passes.source.__class__.__name__})"
    facts = "{0.length}"

    @property
    def length(self) -> Length:
        items = self.passes.fixed_length
        return UNKNOWN if items is None else Length(items)

    @property
    def items_never_change(self) -> bool:
        return self.passes.batches_never_change

    def run(self, ctx: PassContext) -> Iterator[Any]:
        """Run one pass. Raises UsageError at its end if the number of items differs from ``len``."""
        length, drawn = self.length, count()
        with ending(self.passes.begin()) as items:
            yield from map(lambda item, number: item, ctx.times.track_draws(self.label, items), drawn)
        if length.is_exact and (items_drawn := next(drawn)) != length.items:
            raise UsageError(
                f"the {type(self.passes.source).__name__} says that it has {length.items} items, but pass {ctx.number} had "
                f"{items_drawn}: give Flow.from_callable or the input a function that returns it, if its length varies"
            )


@dataclass(frozen=True)
class FromCallable(FromIterable):
    """The items that a :class:`.Function` returns, which is called once per pass."""

    title = "from_callable({0.passes.source.name})"
    facts = ""


Labels = Mapping[str, int] | Sequence[int]


@dataclass(frozen=True)
class FromFiles(KeyedSource):
    """The files of a folder at ``paths`` (relative, sorted, with ``/``), and their ``labels``.

    Paths are sorted by code points, which is the order of their UTF-8 bytes. ``digests`` distinguish flows.
    """

    folder: Path
    paths: tuple[str, ...]
    labels: tuple[int, ...]
    seed: int | None
    digests: str

    title = "from_files"
    facts = "{0.length}, {0.digests}, seed={0.seed}"

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        *,
        suffixes: Sequence[str] | None,
        seed: int | None,
        labels: Labels | None = None,
    ) -> Self:
        """List the folder; labels are the given ones, or the positions of the sorted class folders."""
        if not (suffixes is None or is_sequence(suffixes)):
            raise UsageError(f"suffixes must be a list, not {suffixes!r}: give ['.jpg'] for JPEGs")
        endings = IMAGE_SUFFIXES if suffixes is None else tuple(suffix.lower() for suffix in suffixes)
        top = user_path(folder).resolve()
        if not top.is_dir():
            raise UsageError("is not a folder", path=folder)
        walk = FolderWalk(top)
        files = (file.path for file in walk.files_below())
        paths = tuple(sorted(path for path in files if path.lower().endswith(endings)))
        if labels is None and (loose := [path for path in paths if "/" not in path]):
            raise UsageError(
                "is not in a class folder; move it into one, or give labels=", path=top / loose[0]
            )
        walk.problems.raise_all()
        if not paths:
            raise UsageError(
                f"has no files that end in {', '.join(endings)}; without labels=, they lie in folders of classes",
                path=folder,
            )
        digests = f"paths={crc32(repr(paths).encode()):08x}"
        if labels is None:
            label_of = {name: label for label, name in enumerate(walk.folders())}
            file_labels = tuple(label_of[path.partition("/")[0]] for path in paths)
        else:
            file_labels = _check_labels(labels, paths, top)
            digests += f" labels={crc32(repr(file_labels).encode()):08x}"
        return cls(top, paths, file_labels, None if seed is None else check_seed(seed), digests)

    @property
    def length(self) -> Length:
        return Length(len(self.paths))

    @property
    def fetch(self) -> Fetch:
        return partial[Any](nullcontext, partial(_read_file, self.folder))

    def keys(self, ctx: PassContext, numbers: Iterable[int] | None) -> Iterator[tuple[str, int]]:
        places = self.check_numbers(numbers)
        if self.seed is not None:
            places = map(permutation(len(self.paths), ctx.bits(self, self.seed)).item, places)
        return ((self.paths[place], self.labels[place]) for place in places)


def _check_labels(labels: Labels, paths: tuple[str, ...], folder: Path) -> tuple[int, ...]:
    """Return the given labels of the files. Raises UsageError unless there is one for each."""
    if not isinstance(labels, Sized):
        raise UsageError(f"labels= must have a label for each file, not {labels!r}")
    if isinstance(labels, Mapping):
        if unmatched := labels.keys() ^ set(paths):
            name = min(map(str, unmatched))
            where = "files" if name in paths else "labels"
            raise UsageError(f"give one label for each file; {name} is only among the {where}", path=folder)
        labels = [labels[path] for path in paths]
    if len(labels) != len(paths):
        raise UsageError(f"has {len(paths):,} files, and labels= has {len(labels):,}", path=folder)
    return tuple(check_int(label, "a label", least=-1) for label in labels)


def _read_file(folder: Path, key: tuple[str, int]) -> tuple[bytes, int]:
    return (folder / key[0]).read_bytes(), key[1]


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
            yield partial(self._read, records) if form is None else partial(self._read_saved, records, form)

    def _read(self, records: OpenRecords, key: ItemKey) -> tuple[Any, ...]:
        number, shard, ordinal, address = key
        label = self.labels[address[1]]
        image: Any = (
            records.read_image(shard, ordinal, address) if self.names is None or IMAGE in self.names else b""
        )
        if self.names is not None:
            record = records.record(RecordPlace(number, shard, ordinal, address[0]), label, image)
            image = {each: image if each == IMAGE else record.columns[each] for each in self.names}
        return (address[0].decode(), image, label) if self.with_keys else (image, label)

    def _read_saved(self, records: OpenRecords, form: ItemForm, key: ItemKey) -> Any:
        number, shard, ordinal, address = key
        image = records.read_image(shard, ordinal, address) if IMAGE in form.own_names else b""
        place = RecordPlace(number, shard, ordinal, address[0])
        values = [records.value(name, place) for name in form.columns]
        return form.item(address[0].decode(), self.labels[address[1]], image, values)


class PassDownloads(Owner, Closable):
    """Downloads ahead of a flow's passes, one pass after the other. :meth:`close` cancels them."""

    def __init__(self, source: FileSource) -> None:
        self._cache = source.open_cache()
        self._prefetcher = Prefetcher(self._cache, ahead=0)
        self._end = Finalizer(self, partial(end_downloads, self._cache, self._prefetcher))
        self._prefetcher.start()

    def close(self) -> None:
        self._end()

    @contextmanager
    def prefetch(self, files: Sequence[FileEntry]) -> Iterator[FileCache]:
        """Context of the cache for a pass over these files; downloads begun before its end finish."""
        self._prefetcher.replace_files(files)
        try:
            yield self._cache
        finally:
            if self.was_made_here:  # after a fork, a thread that was not copied may hold the lock
                self._prefetcher.replace_files(())


ANNOUNCED_RECORDS = 256  # records passed to the read-ahead thread at a time


@dataclass(frozen=True)
class FromDataset(KeyedSource):
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
        source = cls(dataset, plan, with_keys, WantedColumns.of(dataset, columns))
        Finalizer(source, dataset.close)
        return source

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

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        with self._keys_and_cache(ctx, numbers) as (keys, cache), self.fetch(cache) as item_of:
            yield from map(ctx.times.track(self.label, item_of), keys)

    def keys(self, ctx: PassContext, numbers: Iterable[int] | None) -> Iterator[Any]:
        with self._keys_and_cache(ctx, numbers) as (keys, _):
            yield from keys

    @contextmanager
    def _keys_and_cache(
        self, ctx: PassContext, numbers: Iterable[int] | None
    ) -> Iterator[tuple[Iterator[ItemKey], FileCache | None]]:
        """Context of a pass's keys, with their shards downloaded or read ahead, and the open cache."""
        shards, order = self.plan.shard_order(ctx.number), self.plan.order(ctx.number)
        places: Iterable[int] = self.check_numbers(numbers)
        parts = self.columns.files_of(self.dataset)
        if isinstance(self.dataset, CachedDataset):
            files = ShardFiles(parts, with_image=self.columns.with_image)
            places = iter(places)
            first = list(islice(places, 1))  # where a resumed pass continues
            start = sum(first) // self.plan.batch_size * self.plan.batch_size
            uses = shard_uses(self.plan, ctx.number, start=start)
            make = partial(PassDownloads, FileSource.of(self.dataset))
            with (
                ctx.resources.borrow((ctx.key_of(self), "downloads"), make) as downloads,
                downloads.prefetch(files.of(uses.shards.tolist())) as cache,
            ):
                yield map(self._key, order.numbers_at(chain(first, places))), cache
        else:
            blocks = blocks_to_read(self.dataset, parts, with_image=self.columns.with_image)
            with reading_ahead(self.dataset.path, blocks, shards, budget=READ_AHEAD_BYTES) as ahead:
                if ahead:
                    places = _announce(ahead, order, places)
                yield map(self._key, order.numbers_at(places)), None

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
        if form is None or form.columns != dataset.schema.names[: len(form.columns)]:  # then joined columns
            raise ManifestDamaged("describes its items by columns that it does not have", path=dataset.path)
        (part,) = dataset.parts
        parts = (part.files(dataset.label_space, form.columns, ()),)
        labels: tuple[Any, ...] = dataset.classes
        if not form.is_named:
            number_of = {name: number for number, name in enumerate(form.classes)}
            labels = tuple(number_of.get(name, place) for place, name in enumerate(labels))
        return RecordFetch(parts, FileSource.of(dataset), (*labels, -1), form=form).open


def _announce(ahead: list[ReadAhead], order: EpochOrder, places: Iterable[int]) -> Iterator[int]:
    """Yield these places, announcing records ahead while the places are consecutive."""
    due, last = 0, -1
    for place in places:
        if place == last + 1 and place >= due:
            due = place + ANNOUNCED_RECORDS
            for each in ahead:
                each.expect(order[place:due])
        last = place
        yield place


@dataclass(frozen=True)
class FromParts(Node):
    """One item from ``function(0)``, ``function(1)``, ... in turn. See :meth:`.Flow.from_parts`."""

    function: Function
    parts: int

    title = "from_parts({0.function.name})"
    length = UNKNOWN

    def run(self, ctx: PassContext) -> Iterator[Any]:
        with ending_all([self.part(ctx, number) for number in range(self.parts)]) as begun:
            due = deque(begun)
            while due:
                items = due.popleft()
                if drawn := list(islice(items, 1)):
                    due.append(items)
                    yield drawn.pop()

    def part(self, ctx: PassContext, number: int) -> Iterator[Any]:
        """Run one part. Closing or dropping the iterator releases its resources."""
        return ctx.times.track_draws(self.label, self._run_part(ctx, number))

    def _run_part(self, ctx: PassContext, number: int) -> Iterator[Any]:
        items = ctx.annotate_errors(self.label, lambda part, _: self.function(part))(number, number)
        if as_part := getattr(items, "as_part", None):  # a flow
            yield from as_part(ctx, number)
            return
        with ending(Passes(check_items(items, self.function)).begin()) as begun:
            yield from begun


PER_PHOTOGRAPH = 2
MEAN_BYTES = 110_000
SPREAD = 0.55  # standard deviation of the logarithm of a file's size
BYTES_PER_PIXEL = 0.57  # measured with this grain and quality
GRAIN, QUALITY = 7, 96
ASPECTS = (4 / 3, 4 / 3, 3 / 4, 1.0)


def make_fake_files(seed: int) -> list[memoryview]:
    """Make fifty JPEG files, 110 KB on average. Deterministic for equal releases of OpenCV and NumPy."""
    from shardprep.formats.sources.sample import Album  # start-up time

    rng = np.random.default_rng(seed)
    photographs = Album(lambda: None).photographs
    count = PER_PHOTOGRAPH * len(photographs)
    sizes = np.exp(SPREAD * rng.standard_normal(count))
    pixels = sizes / sizes.mean() * MEAN_BYTES / BYTES_PER_PIXEL
    files = []
    for n, area in enumerate(pixels.tolist()):
        aspect, photograph = ASPECTS[rng.integers(len(ASPECTS))], photographs[n % len(photographs)]
        target = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        height, width = (round(side * rng.uniform(0.6, 1.0)) for side in photograph.shape[:2])
        y, x = (int(rng.integers(side + 1)) for side in np.subtract(photograph.shape[:2], (height, width)))
        image = cv2.resize(photograph[y : y + height, x : x + width], target, interpolation=cv2.INTER_CUBIC)
        grain = GRAIN * rng.standard_normal(image.shape, np.float32)
        noisy = np.clip(image + grain, 0, 255).astype(np.uint8)
        file = cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
        files.append(memoryview(file))
    return files


@dataclass(frozen=True)
class MadeUp:
    """Batches of noise images, or of encoded files, and labels: views of a few records made once.

    The options are those of :class:`.FakeData`. Picklable to a few bytes. Raises UsageError for an option
    that is out of range.
    """

    batch_size: int
    size: tuple[int, int]
    encoded: bool
    seconds: float
    seed: int
    classes: int = 1000

    def __post_init__(self) -> None:
        if not isinstance(self.size, tuple | list | np.ndarray) or len(self.size) != 2:
            raise UsageError(f"size must be (height, width), not {self.size!r}")
        sides = [("each side of size", side) for side in self.size]
        for name, value in [("batch_size", self.batch_size), ("classes", self.classes), *sides]:
            check_int(value, name, least=1)
        check_seconds(self.seconds, "the time per record")
        check_flags(encoded=self.encoded)
        check_seed(self.seed)
        self._records  # noqa: B018 - in advance, so that the first batch takes no longer than others

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), astuple(self)

    @cached_property
    def _records(self) -> tuple[npt.NDArray[np.int64], Any]:
        """The labels and images of two batches, or of all files."""
        rng = np.random.default_rng(self.seed)
        labels = rng.integers(0, self.classes, 2 * self.batch_size)
        if self.encoded:
            return labels, make_fake_files(self.seed)
        noise = allocate_aligned(2 * self.batch_size * 3 * math.prod(self.size))
        noise[:] = np.frombuffer(rng.bytes(noise.size), np.uint8)
        noise.flags.writeable = False
        return labels, noise.reshape(-1, *self.size, 3)

    def batch(self, number: int) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return the images and labels of the batch with this number, after the delay."""
        if self.seconds:  # a sleep of 0 would still hand the CPU to other processes
            time.sleep(float(self.seconds) * self.batch_size)
        all_labels, images = self._records
        labels = allocate_aligned(8 * self.batch_size).view(np.int64)
        start = number % (self.batch_size + 1)
        labels[:] = all_labels[start : start + self.batch_size]
        labels.flags.writeable = False
        first = number * self.batch_size
        if self.encoded:
            return [images[row % len(images)] for row in range(first, first + self.batch_size)], labels
        step = ALIGNMENT // math.gcd(ALIGNMENT, 3 * math.prod(self.size))  # so that pixels are aligned
        start = number % (self.batch_size // step + 1) * step
        return images[start : start + self.batch_size], labels

    def item(self, number: int) -> tuple[Any, int]:
        """Return the image and label of a batch of one record."""
        (image,), labels = self.batch(number)
        return image.obj if isinstance(image, memoryview) else image, labels.item()


@dataclass(frozen=True)
class FromFakeData(KeyedSource):
    """``count`` made-up items. See :meth:`.Flow.fake`."""

    data: MadeUp
    count: int

    title = FAKE
    facts = "{0.length}"

    @property
    def length(self) -> Length:
        return Length(self.count)

    @property
    def fetch(self) -> Fetch:
        return partial[Any](nullcontext, self.data.item)

    def keys(self, ctx: PassContext, numbers: Iterable[int] | None) -> Iterator[int]:
        return self.check_numbers(numbers)


@dataclass(frozen=True)
class FromFakeBatches(FromFakeData):
    """``count`` made-up batches. See :class:`.FakeData`."""

    makes_batches = True
    facts = (
        "{0.length}, batch_size={0.data.batch_size}, size=({0.data.size[0]}, {0.data.size[1]}), "
        "encoded={0.data.encoded}, seed={0.data.seed}, classes={0.data.classes}"
    )

    @property
    def fetch(self) -> Fetch:
        return partial[Any](nullcontext, self.data.batch)
