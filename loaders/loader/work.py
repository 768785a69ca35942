"""The records that the options of a loader choose, their order, and the work on them.

A worker reads a record, transforms it, and writes it to a row of the batch.
"""

from __future__ import annotations

import math
import os
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise
from operator import methodcaller
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, BadTarget, CorruptRecord, ShardDamaged, UsageError
from shardprep.formats.images.header import CROP_READY
from shardprep.formats.records.schema import Field, is_masked
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.progress import check_int, check_seed, count_of
from shardprep.formats.shards.columns import OpenRecords, PartFiles, RecordPlace
from shardprep.formats.shards.dataset import Block, RecordSet, blocks_of
from shardprep.formats.shards.manifest import box_columns
from shardprep.formats.shards.read import ADDRESS, DAMAGE, Address, Room
from shardprep.formats.storage.cache import FileSource
from shardprep.formats.storage.store import Location, path_or_place
from shardprep.loaders.batches.pickling import ALIGNMENT
from shardprep.loaders.batches.slots import INPUTS, Arrays, RowForm, SlotLayout
from shardprep.loaders.batches.stack import JsonValues, gather
from shardprep.loaders.engine.dispatcher import BatchRequest
from shardprep.loaders.engine.messages import (
    ROW_COLUMNS,
    Clock,
    EngineBatch,
    Fill,
    Items,
    RowWriter,
    SkippedRow,
)
from shardprep.loaders.loader.digest import digest_of
from shardprep.loaders.order.epoch import EpochPlan, Shuffle
from shardprep.loaders.order.parts import NO_OMISSION, Omission, Records, WeightedParts
from shardprep.loaders.order.quality import ClassMixing, Means, SortedByClass, sample_mixing
from shardprep.loaders.order.ranks import rank_and_world_size
from shardprep.loaders.order.rng import RecordRandom
from shardprep.loaders.transforms.contract import (
    IMAGE,
    ArraySpec,
    AsColumns,
    Transform,
    TransformInput,
    check_choice,
    fill_rows,
    outputs_of,
)
from shardprep.loaders.transforms.decode import decoding_seconds

STAGES = ("read", "decode", "augment")  # decode is a transform's time in decode_rgb, augment the rest
TRANSFORM_STAGES = STAGES[1:]


@cache
def item_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Return the dtype of an :class:`Item` with a key of at most ``key_bytes`` bytes."""
    place = [("number", "<i8"), ("draw", "<i8"), ("shard", "<u4"), ("ordinal", "<u4"), ("crop_ready", "?")]
    address = zip(ADDRESS, (f"S{key_bytes}", "<i4", "<u4", "<u8", "<u4"), strict=True)
    return np.dtype([("epoch", "<u8"), *place, *ROW_COLUMNS, *address])


class Item(NamedTuple):
    """One record to deliver; ``draw`` numbers its random values, and ROW_COLUMNS describe its row."""

    epoch: int
    number: int
    draw: int
    shard: int
    ordinal: int
    crop_ready: bool
    row: int
    rows: int
    form_at: int
    form_size: int
    key: bytes
    label: int
    crc32c: int
    offset: int
    length: int

    @property
    def address(self) -> Address:
        return self[-5:]


KEYS_AT_ONCE = 1 << 20

Mask = npt.NDArray[np.bool_]
Classes = Iterable[str | int]


class Subset:
    """The chosen records of a dataset, in stored order. A record's place is its number among them.

    Orders, receipts and states refer to places, as if the subset were a separate dataset. The arguments are
    those of a Loader. ``chosen`` has the record numbers, int64, ascending and unique; None for all records of
    the dataset. With ``weights``, the parts' shares of the places differ from their shares of the records.
    ``omission`` has the records omitted from the order. Raises UsageError.
    """

    def __init__(
        self,
        dataset: RecordSet,
        records: npt.ArrayLike | None = None,
        classes: Classes | None = None,
        weights: object = None,
        *,
        without: npt.ArrayLike | None = None,
        gaps: str = "close",
    ) -> None:
        self.dataset = dataset
        self.chosen: Records | None = None
        if records is not None or classes is not None:
            mask = np.ones(len(dataset), np.bool_)
            if records is not None:
                mask &= _mask(records, dataset, "records")
            if classes is not None:
                mask &= np.isin(dataset.index["label"], list(_index_labels(dataset, classes)))
            if not mask.any():
                raise UsageError("records= and classes= select no record of the dataset")
            self.chosen = None if mask.all() else np.flatnonzero(mask)
        names, counts = [part.name for part in dataset.parts], [sum(own) for own in self._counts]
        self.weights = None if weights is None else WeightedParts.of(weights, names, counts)
        check_choice("gaps", gaps, ("close", "keep"))
        self.omission = NO_OMISSION
        if without is not None:
            mask = _mask(without, dataset, "without")
            positions = np.flatnonzero(mask if self.chosen is None else mask[self.chosen])
            if len(positions) == len(self):
                raise UsageError("without= leaves out all records")
            if len(positions):
                self.omission = Omission(positions, gaps == "close", self.weights)

    @property
    def omitted(self) -> Records:
        """The omitted record numbers."""
        positions = self.omission.positions
        return positions if self.chosen is None else self.chosen[positions]

    def __len__(self) -> int:
        return len(self.dataset if self.chosen is None else self.chosen)

    @cached_property
    def identity(self) -> str:
        """The root of the dataset, with digests of chosen records, weights and omitted records."""
        chosen = "" if self.chosen is None else f" records:{digest_of(self.chosen)}"
        weights = "" if self.weights is None else f" weights:{digest_of(self.weights.places)}"
        gaps = "closed" if self.omission.closes_gaps else "kept"
        omitted = f" without:{digest_of(self.omitted)}:{gaps}" if self.omission else ""
        return self.dataset.root + chosen + weights + omitted

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """The number of these records, or with weights of places, in each block of the dataset, as stored."""
        if self.weights and len(self.dataset.parts) > 1:
            return self.weights.blocks(self._counts)
        return tuple(count for counts in self._counts for count in counts)

    @cached_property
    def _counts(self) -> list[list[int]]:
        counts = [block.records for block in self.dataset.blocks]
        bounds = np.cumsum([0, *counts])
        if self.chosen is not None:
            counts = np.diff(np.searchsorted(self.chosen, bounds)).tolist()
        firsts = [part.first_record for part in self.dataset.parts]
        cuts = [*np.searchsorted(bounds, firsts).tolist(), len(counts)]
        return [counts[start:stop] for start, stop in pairwise(cuts)]

    @cached_property
    def mean_image_bytes(self) -> float:
        if self.chosen is None:
            return self.dataset.image_bytes / max(1, len(self))
        return int(self.dataset.index["length"][self.chosen].sum(dtype=np.int64)) / len(self)

    @property
    def mean_stored_bytes(self) -> float:
        """The mean size of the images or, if there are none, of all files of the dataset, per record."""
        size = sum(part.manifest.size for part in self.dataset.parts)
        return self.mean_image_bytes or size / max(1, len(self.dataset))

    @cached_property
    def crop_ready_share(self) -> float:
        if self.chosen is None:
            return self.dataset.crop_ready / max(1, len(self))
        flags = self.dataset.index["flags"][self.chosen]
        return np.count_nonzero(flags & CROP_READY) / max(1, len(self))

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """The labels in the index, by place."""
        labels: npt.NDArray[np.int32] = self.dataset.index["label"]
        return labels if self.chosen is None else labels[self.chosen]

    def numbers(self, epoch: int) -> Records:
        """Return the record numbers of all places."""
        return self.numbers_at(np.arange(len(self)), epoch)

    def numbers_at(self, places: Records, epoch: int) -> Records:
        """Return the record numbers at these places; only weights make them depend on the epoch."""
        positions = self.weights.positions(places, epoch) if self.weights else places
        return positions if self.chosen is None else np.asarray(self.chosen[positions])

    def places_of(self, items: Items) -> Records:
        """Return the places of items; with weights, these number their random values."""
        places: Records = np.ascontiguousarray(items["draw" if self.weights else "number"])
        return places if self.chosen is None or self.weights else np.searchsorted(self.chosen, places)

    def items_at(self, places: Records, epoch: int) -> Items:
        """Return the work items of these places; random values go by record or, with weights, by place."""
        index, numbers = self.dataset.index, self.numbers_at(places, epoch)
        items = np.zeros(len(numbers), item_dtype(index.dtype["key"].itemsize))
        items["epoch"], items["number"] = epoch, numbers
        items["draw"] = places if self.weights else numbers
        rows = index[numbers]
        for column in ("shard", "ordinal", *ADDRESS):
            items[column] = rows[column]
        items["crop_ready"] = rows["flags"] & CROP_READY != 0
        return items


def _to_array(values: object, option: str) -> npt.NDArray[Any]:
    """Return numbers, a mask or keys as an array. Raises UsageError for a dataset, which NumPy would read."""
    if not isinstance(values, Sequence) and not hasattr(values, "__array__"):
        raise _option_error(option, f"a {type(values).__name__}")
    try:
        return np.asanyarray(values)
    except ValueError as error:
        raise _option_error(option, "lists of different lengths") from error


def _option_error(option: str, what: str) -> UsageError:
    return UsageError(
        f"{option}= must be a boolean mask with one value per record, or integers, the record numbers, or keys; not {what}"
    )


def _mask(given: npt.ArrayLike, dataset: RecordSet, option: str) -> Mask:
    """Return a mask of the dataset's records from a mask, record numbers or keys."""
    records, count = _to_array(given, option), len(dataset)
    if is_masked(records):
        raise _option_error(option, "a masked array; fill it")
    if records.ndim == 1 and records.dtype == np.bool_:
        if len(records) != count:
            raise UsageError(f"{option}= is a mask of {len(records):,} records; the dataset has {count:,}")
        return records.astype(np.bool_)
    if records.ndim == 1 and not len(records):  # an empty list has no integer type
        return np.zeros(count, np.bool_)
    is_text = records.dtype.kind in "OSU" and all(isinstance(key, str | bytes) for key in records.ravel())
    if is_text and records.size:
        return _key_mask(records.ravel().tolist(), dataset, option)
    if records.ndim != 1 or records.dtype.kind not in "iu":
        raise _option_error(option, f"an array of {records.dtype} of shape {records.shape}")
    outside = records[(records < 0) | (records >= count)]
    if len(outside):
        raise UsageError(f"{option}= has {outside[0]}; record numbers of this dataset are 0 to {count - 1}")
    mask = np.zeros(count, np.bool_)
    mask[records] = True
    if np.count_nonzero(mask) != len(records):
        seen, times = np.unique(records, return_counts=True)
        raise UsageError(f"{option}= has {seen[times > 1][0]} more than once; give each record number once")
    return mask


def _key_mask(keys: Sequence[str | bytes], dataset: RecordSet, option: str) -> Mask:
    """Return a mask of the records with these keys. Raises UsageError for a key that no record has."""
    encoded = [key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key for key in keys]
    wanted, places = np.unique(np.array(encoded), return_inverse=True)
    mask, seen = np.zeros(len(dataset), np.bool_), np.zeros(len(wanted), np.bool_)
    for start in range(0, len(dataset), KEYS_AT_ONCE):
        stored = np.asarray(dataset.index[start : start + KEYS_AT_ONCE]["key"])
        at = np.minimum(np.searchsorted(wanted, stored), len(wanted) - 1)
        is_wanted = wanted[at] == stored
        mask[start : start + len(stored)] = is_wanted
        seen[at[is_wanted]] = True
    if not seen.all():
        raise UsageError(f"{option}= has the key {keys[int(seen[places].argmin())]!r}, which no record has")
    return mask


def _index_labels(dataset: RecordSet, classes: Classes) -> Iterable[int]:
    """Yield the index labels of classes given by name or by label in the dataset's label space."""
    space = dataset.space
    if isinstance(classes, str | int) or not isinstance(classes, Iterable):
        raise UsageError(f"classes= must be a list of class names or labels, not {classes!r}")
    labels = space.mapping(dataset.label_space)[: len(space)].tolist()
    if not labels:
        raise UsageError("the dataset has no classes; choose records by their numbers, with records=")
    indexed: dict[object, int] = {label: place for place, label in enumerate(labels)} | space.label_of
    for name in classes:
        is_name = isinstance(name, str | int | np.integer) and not isinstance(name, bool)
        label = indexed.get(name) if is_name else None
        if label is None:
            raise UsageError(
                f"the dataset has no class {name!r}; open_dataset(path).classes has the names, and the labels "
                f"({dataset.label_space}) are {min(labels)} to {max(labels)}"
            )
        yield label


_warned_roots: set[str] = set()  # roots of datasets

ROOM_FOR_ROWS = 4 << 30  # bytes of address space, twice in each slot; only what is written uses memory


def location_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the URL of a dataset, or its absolute path."""
    place = path_or_place(path)
    return place.url if isinstance(place, Location) else place.absolute()


def make_epoch_plan(
    subset: Subset,
    *,
    shuffle: Shuffle | None,
    seed: int,
    batch_size: int,
    rank: int | None = 0,
    world_size: int | None = 1,
    drop_last: bool = False,
) -> EpochPlan:
    if not isinstance(shuffle, Shuffle | None):
        raise UsageError(f"shuffle must be LocalShuffle(n), GlobalShuffle() or None, not {shuffle!r}")
    rank, world_size = rank_and_world_size(rank, world_size)
    plan = EpochPlan(
        dataset=subset.identity,
        shard_counts=subset.shard_counts,
        shuffle=shuffle.in_records(subset.mean_stored_bytes) if shuffle else None,
        seed=check_seed(seed),
        batch_size=check_int(batch_size, "batch_size", least=1),
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
        omission=subset.omission,
    )
    if plan.shuffle:
        _warn_of_bad_mixing(subset, plan, plan.shuffle)
    return plan


def _warn_of_bad_mixing(subset: Subset, plan: EpochPlan, shuffle: Shuffle) -> None:
    """Warn once of few classes per batch, by a model for class-sorted datasets, else by a sample."""
    records, window = len(subset), shuffle.window_of(len(subset))
    means, least = None, None
    if window >= records:
        return
    if subset.dataset.class_sorted:
        labels, omission = subset.labels, plan.omission
        left = np.delete(labels, omission.positions) if omission.closes_gaps else labels
        classes = len(np.unique(left))
        mixing = ClassMixing(records, classes, records / len(plan.shard_counts), plan.batch_size)
        mixed = Means(mixing.per_batch(window), mixing.per_batch(records))
        if not mixed.is_enough:
            means, least = mixed, mixing.least_window()
    elif isinstance(subset.dataset.index, np.ndarray) and subset.weights is None:  # else labels are on disk
        means = sample_mixing(plan, subset.labels, window)
    if means and plan.dataset not in _warned_roots:
        _warned_roots.add(plan.dataset)
        warnings.warn(
            f"{subset.dataset.location} stores each class side by side: with a window of {window:,} records, a "
            f"batch of {plan.batch_size} has about {count_of(round(means.found), 'class')}; with a GlobalShuffle(), "
            f"{means.expected:.0f}. Use that, {f'a LocalShuffle of at least {least:,} records' if least else 'a larger window'}, "
            "or convert to shards with --order shuffled; print(loader.shuffle_quality()) says more",
            SortedByClass,
            stacklevel=4,  # the line that makes the Loader
        )


def make_layout(transform: Transform | None, *, rows: int, mean_bytes: float, workers: int) -> SlotLayout:
    """Return a layout with rows for declared outputs, and spare bytes for others: twice a record's bytes.

    For a transform without declared outputs, workers get room for results of any size, and for rows of the
    form found in them, unless the system limits address space; then most results are sent.
    """
    spare = math.ceil(2 * mean_bytes)
    if isinstance(transform, AsColumns):
        return SlotLayout(rows, transform.rows, spare=spare if transform.varying_names else 0)
    outputs = outputs_of(transform) if transform is not None else None
    if outputs is not None:
        return SlotLayout(rows, outputs)
    limits = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    is_free = all(resource.getrlimit(limit)[0] == resource.RLIM_INFINITY for limit in limits)
    room = ROOM_FOR_ROWS if transform is not None and workers and is_free else 0
    spare = max(spare, room // rows // ALIGNMENT * ALIGNMENT)
    return SlotLayout(rows, (), spare=spare, inputs=room, sparse=room > 0)


def describe_item(item: Any) -> str:
    return str(item["key"], errors="replace")


def locate_item(item: Any) -> str:
    return f"{describe_item(item)} (record {item['number']}, shard {item['shard']})"


class WantedColumns(NamedTuple):
    """The ``names`` of the columns to read, in order, including "image" if it is read.

    ``fields`` has those stored as columns, and ``boxes`` those from the table of boxes, for a transform;
    ``names`` has these only if chosen. ``are_chosen`` is False if there are only images. The name of this
    class enters the identity of flows, and with it the states of remote sources.
    """

    names: tuple[str, ...]
    fields: tuple[Field, ...]
    boxes: tuple[str, ...]
    are_chosen: bool

    @property
    def with_image(self) -> bool:
        return IMAGE in self.names

    @property
    def as_columns(self) -> AsColumns:
        """A transform that delivers these columns as they are."""
        rows = []
        for column in self.fields:
            if (dtype := column.codec.dtype) is not None:  # its values have one size
                base, shape = dtype.subdtype or (dtype, ())
                kind = "int64" if column.kind == "label" else base.newbyteorder("=").name
                rows.append(ArraySpec(column.name, shape, kind))
        json = tuple(column.name for column in self.fields if column.kind == "json")
        return AsColumns(self.names, tuple(rows), json)

    def files_of(self, dataset: RecordSet) -> tuple[PartFiles, ...]:
        names = [field.name for field in self.fields]
        return tuple(part.files(dataset.label_space, names, self.boxes) for part in dataset.parts)

    @classmethod
    def of(cls, dataset: RecordSet, names: Sequence[str] | None) -> Self:
        """Return the columns with these names, None for all. Raises UsageError for unknown names, or none."""
        first = dataset.parts[0].manifest
        stored = ((IMAGE,) if first.has_images else ()) + dataset.schema.names
        of_parts = [box_columns(part.manifest) for part in dataset.parts]
        boxes = of_parts[0] if all(of_parts) else ()
        known = stored + boxes
        if isinstance(names, str) or not isinstance(names, Iterable | None):
            raise UsageError(f'columns must be a list of names, such as ["image"], not {names!r}')
        chosen = stored if names is None else tuple(names)
        for name in chosen:
            if name not in known or chosen.count(name) > 1:
                raise UsageError(f"unknown or repeated column {name!r}; choose from {', '.join(known)}")
        if not chosen:
            raise UsageError(f"columns is empty; choose from {', '.join(known)}")
        fields = {field.name: field for field in dataset.schema}
        wanted = boxes if names is None else tuple(name for name in chosen if name in boxes)
        own = tuple(fields[name] for name in chosen if name in fields)
        return cls(chosen, own, wanted, names is not None or bool(fields))


def mean_bytes(parts: Iterable[PartFiles]) -> float:
    """Return the mean bytes of a record's variable-size values, without the image."""
    counts = [(sum(s.size for c in part.columns for s in c.shards), part.records) for part in parts]
    return sum(size for size, _ in counts) / max(1, sum(records for _, records in counts))


def blocks_to_read(
    dataset: RecordSet, parts: Sequence[PartFiles], *, with_image: bool
) -> list[tuple[Block, ...]]:
    """Return the blocks to read of the images and of each column with shards."""
    blocks = [dataset.blocks] if with_image else []
    for at, column in enumerate(parts[0].columns):
        if column.shards and not dataset.in_place:  # in place, blocks belong to archives
            pairs = zip(dataset.parts, parts, strict=True)
            placed = (dataset.locate(part, blocks_of(files.columns[at].shards)) for part, files in pairs)
            blocks.append(tuple(chain.from_iterable(placed)))
    return blocks


@dataclass(frozen=True)
class ShardWork:
    """A loader's work: where its shards are and how to process each record. Picklable.

    Keys have at most ``key_bytes`` bytes. ``transform=None`` delivers each record's encoded image.
    ``label_map[label]`` is the label passed to a transform. ``skip_bad`` leaves out damaged records, but a
    shard that cannot be opened is still an error. Damaged copies are fetched again from ``files``. For a
    replay, ``observe`` gets each row, its record and its generator, before the transform.
    """

    parts: tuple[PartFiles, ...]
    key_bytes: int
    transform: Transform | None
    label_map: tuple[int, ...]
    seed: int
    skip_bad: bool
    with_image: bool = True
    files: FileSource = field(default_factory=FileSource)
    observe: Callable[[int, TransformInput, np.random.Generator], object] | None = None

    stages = STAGES

    @property
    def item_dtype(self) -> np.dtype[Any]:
        return item_dtype(self.key_bytes)

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        with self.files.open(held=True) as files, closing(OpenRecords(self.parts, files)) as records:
            yield _ShardWorkspace(self, records, clock).fill


class _ShardWorkspace:
    """The open files of a worker, which fills rows in one thread."""

    def __init__(self, work: ShardWork, records: OpenRecords, clock: Clock) -> None:
        self._work = work
        self._records = records
        self._clock = clock
        self._random = RecordRandom(work.seed)
        self._transform = work.transform or AsColumns(())
        self._outputs = outputs_of(self._transform)

    def fill(self, items: Items, arrays: Arrays, room: Room | None) -> Iterator[object]:
        self._stage_seconds = [0.0] * len(STAGES)
        try:
            if self._work.transform is None and self._work.with_image:
                yield from self._read_images(items, room)
            else:
                yield from self._make_outcomes(items, arrays)
        finally:
            # once for all rows, since adding to an array takes longer than reading a clock
            self._clock += self._stage_seconds

    def _read_images(self, items: Items, room: Room | None) -> Iterator[object]:
        """Yield the encoded images, from whole columns as lists instead of an object per record."""
        places, addresses = items[["shard", "ordinal"]].tolist(), items[[*ADDRESS]].tolist()
        for (number, ordinal), address in zip(places, addresses, strict=True):
            shard = self._records[number]  # if it cannot be opened, skip_bad does not apply
            began = perf_counter()
            try:
                if room is None:
                    image: object = shard.read_image(ordinal, address)
                else:
                    image = shard.read_image_into(ordinal, address, room)
            except DAMAGE as error:
                try:  # from an intact copy
                    image = self._records.retry(number, error, methodcaller("read_image", ordinal, address))
                except (CorruptRecord, ShardDamaged) as damage:
                    if not self._work.skip_bad:
                        raise
                    image = SkippedRow(str(damage))
            self._stage_seconds[0] += perf_counter() - began
            yield image

    def _make_outcomes(self, items: Items, arrays: Arrays) -> Iterator[object]:
        self._written = RowWriter(items, arrays.pop(INPUTS, None))
        transform = self._transform
        if isinstance(transform, AsColumns):
            began = perf_counter()
            numbers, keys = items["number"].tolist(), items["key"].tolist()
            small = {name: arrays[name] for name in transform.small_names}
            if self._records.fill(small, numbers, keys):  # otherwise the records say which one is damaged
                transform = transform.without_small
            self._stage_seconds[0] += perf_counter() - began
            if not transform.names:
                yield from [None] * len(items)
                return
        for row, item in enumerate(map(Item._make, items.tolist())):
            if self._work.with_image:
                self._records[item.shard]  # if it cannot be opened, skip_bad does not apply
            try:
                outcome = self._make_outcome(transform, item, arrays, row)
            except (BadImage, BadTarget, CorruptRecord, ShardDamaged) as error:
                if not self._work.skip_bad:
                    raise
                outcome = SkippedRow(str(error))
            yield outcome

    def _make_outcome(self, transform: Transform, item: Item, arrays: Arrays, row: int) -> object:
        began = perf_counter()
        has_image = self._work.with_image
        record = self._records.record(
            RecordPlace(item.number, item.shard, item.ordinal, item.key),
            self._work.label_map[item.label],
            self._records.read_image(item.shard, item.ordinal, item.address) if has_image else b"",
            is_crop_ready=has_image and item.crop_ready,
        )
        if isinstance(transform, AsColumns):  # counts as reading
            values = transform.write(record, arrays, row)
            self._stage_seconds[0] += perf_counter() - began
            return values
        if self._work.observe:
            self._work.observe(row, record, self._random(item.epoch, item.draw))
        read, decoded = perf_counter(), decoding_seconds()
        rng, outcome = self._random(item.epoch, item.draw), None
        if self._outputs is not None:
            fill_rows(transform, record, rng, tuple(arrays[spec.name][row, ...] for spec in self._outputs))
        elif (result := transform(record, rng)) is None:
            raise UsageError("the transform returned None; it must return an array", key=record.key)
        elif not self._written.write(result, item.row):
            outcome = result
        decoding = decoding_seconds() - decoded
        self._stage_seconds[0] += read - began
        self._stage_seconds[1] += decoding
        self._stage_seconds[2] += perf_counter() - read - decoding
        return outcome


class Results:
    """The parts of a batch, from its arrays and from the results that the workers send.

    Encoded images are a list; columns a dict of arrays if the values agree in dtype and shape, else of lists;
    declared outputs the arrays. Undeclared results may have any form: once all of a batch have the same, the
    workers write results of that form to rows of the slot's input area of ``room`` bytes. The parts do not
    depend on when that happens: a batch that is left without results is an empty list, as if no form were
    known.
    """

    def __init__(self, transform: Transform | None, *, room: int) -> None:
        self._transform, self._room = transform, room
        self._is_declared = transform is not None and outputs_of(transform) is not None
        self._form: RowForm | None = None

    def request(self, items: Items) -> BatchRequest:
        request = BatchRequest(items)
        return request.with_rows(self._form, at=0, room=self._room) if self._form else request

    def parts(self, batch: EngineBatch, skipped: Sequence[int]) -> list[Any]:
        """Return a batch's parts, without skipped rows."""
        if self._transform is None:
            return [list(batch.payloads.values())]
        arrays = dict(zip(batch.arrays, delete_rows(skipped, batch.arrays.values()), strict=True))
        if isinstance(columns := self._transform, AsColumns):
            rows: list[Any] = list(batch.payloads.values())
            sent = {n: _stack_column(columns, n, [row[n] for row in rows]) for n in columns.varying_names}
            return [{name: arrays[name] if name in arrays else sent[name] for name in columns.names}]
        if self._is_declared:
            return list(arrays.values())
        if self._form and len(skipped) < len(batch.items) and not batch.payloads:
            parts = self._form.make_batch(arrays)
        else:
            rows = [row for row in range(len(batch.items)) if row not in batch.skipped]
            results = [batch.result(row) for row in rows]
            if self._form is None and results:
                form = None if isinstance(results[0], list) else RowForm.of(results[0])
                self._form = form if form and all(map(form.arrays_of, results)) else None
            try:
                parts = gather(results)
            except UsageError:
                for row, result in zip(rows, results, strict=True):
                    try:
                        gather([results[0], result])
                    except UsageError as error:
                        error.key = describe_item(batch.items[row])
                        error.add_note(f"The batch's first record is {describe_item(batch.items[rows[0]])}")
                        raise error from None
                raise
        return list(parts) if isinstance(parts, tuple) else [parts]


def _stack_column(columns: AsColumns, name: str, values: list[Any]) -> Any:
    if name in columns.json:
        return JsonValues(values)
    forms = {(value.shape, value.dtype) if isinstance(value, np.ndarray) else None for value in values}
    return np.stack(values) if len(forms) == 1 and None not in forms else values


def delete_rows(skipped: Sequence[int], arrays: Iterable[Any]) -> list[Any]:
    return [np.delete(array, skipped, axis=0) if len(skipped) else array for array in arrays]
