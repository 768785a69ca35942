"""Checks of a loader's options: the records, their columns, and the resulting plan."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.info import ImageFlag
from shardprep.formats.records.codecs import is_masked
from shardprep.formats.records.schema import Field
from shardprep.formats.runtime.sizes import checked_int, seed_of
from shardprep.formats.runtime.workers import usable_cpus
from shardprep.formats.shards.columns import PartFiles
from shardprep.formats.shards.dataset import RecordSet
from shardprep.formats.shards.tables import box_columns
from shardprep.formats.storage.store import Location, path_or_place
from shardprep.loaders.batches.slots import SlotLayout
from shardprep.loaders.engine.messages import Items
from shardprep.loaders.loader.run_card import digest_of
from shardprep.loaders.loader.work import items_of
from shardprep.loaders.order.epoch import EpochPlan, Shuffle
from shardprep.loaders.order.parts import Omission, Records, WeightedParts
from shardprep.loaders.order.quality import ENOUGH, ClassMixing, Means, sampled_mixing, warn_of_few_classes
from shardprep.loaders.order.ranks import rank_and_world_size
from shardprep.loaders.transforms.contract import IMAGE, ArraySpec, AsColumns, Transform, outputs_of

KEYS_AT_ONCE = 1 << 20

Mask = npt.NDArray[np.bool_]
Chosen = npt.ArrayLike
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
        records: Chosen | None = None,
        classes: Classes | None = None,
        weights: object = None,
        *,
        without: Chosen | None = None,
        gaps: str = "close",
    ) -> None:
        self.dataset = dataset
        self.chosen: Records | None = None
        if records is not None or classes is not None:
            mask = np.ones(len(dataset), np.bool_)
            if records is not None:
                mask &= _mask(_array(records, "records"), len(dataset), "records")
            if classes is not None:
                mask &= np.isin(dataset.index["label"], list(_indexed_labels(dataset, classes)))
            if not mask.any():
                raise UsageError("records= and classes= select no record of the dataset")
            self.chosen = None if mask.all() else np.flatnonzero(mask)
        names, counts = [part.name for part in dataset.parts], [sum(own) for own in self._counts]
        self.weights = None if weights is None else WeightedParts.of(weights, names, counts)
        if gaps not in ("close", "keep"):
            raise UsageError(f"gaps must be 'close' or 'keep', not {gaps!r}")
        self.omission = None
        if without is not None:
            self.omission = self._omission(_array(without, "without"), closes=gaps == "close")

    def _omission(self, without: npt.NDArray[Any], *, closes: bool) -> Omission | None:
        is_text = without.dtype.kind == "O" and all(isinstance(one, str | bytes) for one in without.ravel())
        if without.dtype.kind in "US" or (is_text and without.size):
            mask = _mask_of_keys(without.ravel().tolist(), self.dataset)
        else:
            mask = _mask(without, len(self.dataset), "without")
        positions = np.flatnonzero(mask if self.chosen is None else mask[self.chosen])
        if len(positions) == len(self):
            raise UsageError("without= leaves out all records")
        return Omission(positions, closes, self.weights) if len(positions) else None

    @property
    def omitted(self) -> Records | None:
        """The omitted record numbers; None for none."""
        if self.omission is None:
            return None
        positions = self.omission.positions
        return positions if self.chosen is None else self.chosen[positions]

    def __len__(self) -> int:
        return len(self.dataset if self.chosen is None else self.chosen)

    @cached_property
    def identity(self) -> str:
        """The root of the dataset, with digests of chosen records, weights and omitted records."""
        chosen = "" if self.chosen is None else f" records:{digest_of(self.chosen)}"
        weights = "" if self.weights is None else f" weights:{digest_of(self.weights.places)}"
        how = "closed" if self.omission and self.omission.closes else "kept"
        omitted = "" if self.omitted is None else f" without:{digest_of(self.omitted)}:{how}"
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
    def mean_image(self) -> float:
        if self.chosen is None:
            return self.dataset.image_bytes / max(1, len(self))
        return int(self.dataset.index["length"][self.chosen].sum(dtype=np.int64)) / len(self)

    @cached_property
    def crop_ready(self) -> float:
        if self.chosen is None:
            return self.dataset.crop_ready / max(1, len(self))
        flags = self.dataset.index["flags"][self.chosen]
        return np.count_nonzero(flags & ImageFlag.CROP_READY) / max(1, len(self))

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
        found = self.weights.positions(places, epoch) if self.weights else places
        return found if self.chosen is None else np.asarray(self.chosen[found])

    def places_of(self, items: Items) -> Records:
        """Return the places of items; with weights, these number their random values."""
        places: Records = np.ascontiguousarray(items["draw" if self.weights else "number"])
        return places if self.chosen is None or self.weights else np.searchsorted(self.chosen, places)

    def items_at(self, places: Records, epoch: int) -> Items:
        """Return the work items of the records at these places.

        Random values are numbered by record or, with weights, which may repeat records, by place.
        """
        numbers = self.numbers_at(places, epoch)
        return items_of(self.dataset.index, numbers, epoch, draws=places if self.weights else None)


def _array(given: object, option: str) -> npt.NDArray[Any]:
    """Return numbers, a mask or keys as an array. Raises UsageError for a dataset, which NumPy would read."""
    if not isinstance(given, Sequence) and not hasattr(given, "__array__"):
        raise _unfit(option, f"a {type(given).__name__}")
    return np.asanyarray(given)


def _unfit(option: str, given: str) -> UsageError:
    keys = ", or keys" if option == "without" else ""
    return UsageError(
        f"{option}= must be a boolean mask with one value per record, or integers, the record numbers{keys}; not {given}"
    )


def _mask(records: npt.NDArray[np.generic], count: int, option: str) -> Mask:
    """Return a mask of ``count`` records from a mask or an array of record numbers."""
    if is_masked(records):
        raise _unfit(option, "a masked array; fill it")
    if records.ndim == 1 and records.dtype == np.bool_:
        if len(records) != count:
            raise UsageError(f"{option}= is a mask of {len(records)} records; the dataset has {count}")
        return records.astype(np.bool_)
    if records.ndim == 1 and not len(records):  # an empty list has no integer type
        return np.zeros(count, np.bool_)
    if records.ndim != 1 or records.dtype.kind not in "iu":
        raise _unfit(option, f"an array of {records.dtype} of shape {records.shape}")
    outside = records[(records < 0) | (records >= count)]  # type: ignore[operator]
    if len(outside):
        raise UsageError(f"{option}= has {outside[0]}; record numbers of this dataset are 0 to {count - 1}")
    mask = np.zeros(count, np.bool_)
    mask[records] = True
    if np.count_nonzero(mask) != len(records):
        found, times = np.unique(records, return_counts=True)
        raise UsageError(f"{option}= has {found[times > 1][0]} more than once; give each record number once")
    return mask


def _mask_of_keys(keys: Sequence[str | bytes], dataset: RecordSet) -> Mask:
    """Return a mask of the records with these keys. Raises UsageError for a key that no record has."""
    wanted = np.array([key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key for key in keys])
    mask, found = np.zeros(len(dataset), np.bool_), np.zeros(len(wanted), np.bool_)
    for start in range(0, len(dataset), KEYS_AT_ONCE):
        there = np.asarray(dataset.index[start : start + KEYS_AT_ONCE]["key"])
        mask[start : start + len(there)] = np.isin(there, wanted)
        found |= np.isin(wanted, there)
    if not found.all():
        raise UsageError(f"without= has the key {keys[int(found.argmin())]!r}, which no record has")
    return mask


def _indexed_labels(dataset: RecordSet, classes: Classes) -> Iterable[int]:
    """Yield the index labels of classes given by name or by label in the dataset's label space."""
    space = dataset.space
    if isinstance(classes, str | int) or not isinstance(classes, Iterable):
        raise UsageError(f"classes= must be a list of class names or labels, not {classes!r}")
    labels = space.mapping(dataset.label_space)[: len(space)].tolist()
    known: dict[object, int] = {label: place for place, label in enumerate(labels)}
    known.update(space.label_of)
    for name in classes:
        found = known.get(name) if isinstance(name, str | int | np.integer) else None
        if found is None:
            raise UsageError(
                f"the dataset has no class {name!r}; open_dataset(path).classes has the names, and the labels "
                f"({dataset.label_space}) are {min(labels)} to {max(labels)}"
            )
        yield found


ROOM_FOR_ROWS = 4 << 30  # bytes of address space in each slot; only written rows use memory


def place_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the URL of a dataset, or its absolute path."""
    place = path_or_place(path)
    return place.url if isinstance(place, Location) else place.absolute()


def plan_of(
    subset: Subset,
    *,
    shuffle: Shuffle | None,
    seed: int,
    batch_size: int,
    rank: int | None,
    world_size: int | None,
    drop_last: bool,
) -> EpochPlan:
    if not isinstance(shuffle, Shuffle | None):
        raise UsageError(f"shuffle must be LocalShuffle(n), GlobalShuffle() or None, not {shuffle!r}")
    rank, world_size = rank_and_world_size(rank, world_size)
    plan = EpochPlan(
        dataset=subset.identity,
        shard_counts=subset.shard_counts,
        shuffle=shuffle.in_records(subset.mean_image) if shuffle else None,
        seed=seed_of(seed),
        batch_size=checked_int(batch_size, "batch_size", least=1),
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
        omission=subset.omission,
    )
    if plan.shuffle:
        _warn_of_bad_mixing(subset, plan, plan.shuffle)
    return plan


def _warn_of_bad_mixing(subset: Subset, plan: EpochPlan, shuffle: Shuffle) -> None:
    """Warn if batches have few of the classes, by a model for class-sorted datasets, else by a sample."""
    records, window = len(subset), shuffle.window_of(len(subset))
    in_place, place = subset.dataset.in_place, subset.dataset.location
    if window >= records:
        return
    if subset.dataset.class_sorted:
        labels, omission = subset.labels, plan.omission
        left = np.delete(labels, omission.positions) if omission and omission.closes else labels
        classes = len(np.unique(left))
        mixing = ClassMixing(records, classes, records / len(plan.shard_counts), plan.batch_size)
        found = Means(mixing.per_batch(window), mixing.per_batch(records))
        if found.found < ENOUGH * found.expected:
            least = mixing.least_window()
            local = f"a LocalShuffle of at least {least} records, " if least else ""
            use = f"{local}or {'convert it to shards' if in_place else 'convert without --order key'}"
            warn_of_few_classes(found, plan, window, place, "is sorted by class", use)
    elif not isinstance(subset.dataset.index, np.ndarray) or subset.weights is not None:
        return  # labels of large collections, and by weighted places, are not in memory
    elif few := sampled_mixing(plan, subset.labels, window):
        use = f"a larger window, or {'convert it to shards' if in_place else 'write it in a shuffled order'}"
        use += "; print(loader.shuffle_quality()) says more"
        warn_of_few_classes(few, plan, window, place, "has records of a class side by side", use)


def layout_of(transform: Transform | None, *, rows: int, mean_bytes: float, workers: int) -> SlotLayout:
    """Return a layout with rows for declared outputs, and spare bytes for others: twice a record's bytes.

    For a transform without declared outputs, workers get room for rows of the form found in its results,
    unless the system limits address space; then each result is sent.
    """
    spare = math.ceil(2 * mean_bytes)
    if isinstance(transform, AsColumns):
        return SlotLayout(rows, transform.rows, spare=spare if transform.sent else 0)
    outputs = outputs_of(transform) if transform is not None else None
    if outputs is not None:
        return SlotLayout(rows, outputs)
    limits = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    is_free = all(resource.getrlimit(limit)[0] == resource.RLIM_INFINITY for limit in limits)
    room = ROOM_FOR_ROWS if transform is not None and workers and is_free else 0
    return SlotLayout(rows, (), spare=spare, inputs=room, sparse=room > 0)


def worker_count(workers: object) -> int:
    return usable_cpus() if workers == "auto" else checked_int(workers, "workers, if not 'auto',", least=0)


def described(item: Any) -> str:
    return str(item["key"], errors="replace")


def located(item: Any) -> str:
    return f"{described(item)} (record {item['number']}, shard {item['shard']})"


class WantedColumns(NamedTuple):
    """The ``names`` of the columns to read, in order, including "image" if it is read.

    ``fields`` has those stored as columns, and ``boxes`` those from the table of boxes, for a transform;
    ``names`` has these only if chosen. ``are_chosen`` is False if there are only images.
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
        rows = tuple(spec for field in self.fields if (spec := _row_of(field)))
        return AsColumns(self.names, rows, tuple(field.name for field in self.fields if field.kind == "json"))

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
        there = stored + boxes
        if isinstance(names, str):
            raise UsageError(f"columns must be a list of names, such as ({names!r},), not {names!r}")
        chosen = stored if names is None else tuple(names)
        for name in chosen:
            if name not in there or chosen.count(name) > 1:
                raise UsageError(f"unknown or repeated column {name!r}; known are {', '.join(there)}")
        if not chosen:
            raise UsageError(f"columns is empty; it may have {', '.join(there)}")
        fields = {field.name: field for field in dataset.schema}
        wanted = boxes if names is None else tuple(name for name in chosen if name in boxes)
        own = tuple(fields[name] for name in chosen if name in fields)
        return cls(chosen, own, wanted, names is not None or bool(fields))


def mean_bytes(parts: Iterable[PartFiles]) -> float:
    """Return the mean bytes of a record's variable-size values, without the image."""
    counts = [(sum(s.size for c in part.columns for s in c.shards), part.records) for part in parts]
    return sum(size for size, _ in counts) / max(1, sum(records for _, records in counts))


def _row_of(field: Field) -> ArraySpec | None:
    """Return the row of a fixed-size value, None for others; labels are int64, as the dataset's."""
    dtype = field.codec.dtype
    if dtype is None:
        return None
    base, shape = dtype.subdtype or (dtype, ())
    return ArraySpec(field.name, shape, "int64" if field.kind == "label" else base.newbyteorder("=").name)
