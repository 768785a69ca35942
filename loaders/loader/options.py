"""Checks of a loader's options: the columns of its records, its plan and the layout of its slots."""

from __future__ import annotations

import math
import os
import resource
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.records.schema import Field
from shardprep.formats.runtime.progress import checked_int, seed_of
from shardprep.formats.shards.columns import PartFiles
from shardprep.formats.shards.dataset import RecordSet
from shardprep.formats.shards.manifest import box_columns
from shardprep.formats.storage.store import Location, path_or_place
from shardprep.loaders.batches.slots import SlotLayout
from shardprep.loaders.loader.work import Subset
from shardprep.loaders.order.epoch import EpochPlan, Shuffle
from shardprep.loaders.order.quality import ENOUGH, ClassMixing, Means, SortedByClass, sampled_mixing
from shardprep.loaders.order.ranks import rank_and_world_size
from shardprep.loaders.transforms.contract import IMAGE, ArraySpec, AsColumns, Transform, outputs_of

_warned: set[str] = set()  # roots of datasets

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
    """Warn once of few classes per batch, by a model for class-sorted datasets, else by a sample."""
    records, window = len(subset), shuffle.window_of(len(subset))
    found, least = None, None
    if window >= records:
        return
    if subset.dataset.class_sorted:
        labels, omission = subset.labels, plan.omission
        left = np.delete(labels, omission.positions) if omission.closes else labels
        classes = len(np.unique(left))
        mixing = ClassMixing(records, classes, records / len(plan.shard_counts), plan.batch_size)
        mixed = Means(mixing.per_batch(window), mixing.per_batch(records))
        if mixed.found < ENOUGH * mixed.expected:
            found, least = mixed, mixing.least_window()
    elif isinstance(subset.dataset.index, np.ndarray) and subset.weights is None:  # else labels are on disk
        found = sampled_mixing(plan, subset.labels, window)
    if found and plan.dataset not in _warned:
        _warned.add(plan.dataset)
        warnings.warn(
            f"{subset.dataset.location} stores each class side by side: with a window of {window:,} records, a "
            f"batch of {plan.batch_size} has about {found.found:.0f} classes; with a GlobalShuffle(), "
            f"{found.expected:.0f}. Use that, {f'a LocalShuffle of at least {least:,} records' if least else 'a larger window'}, "
            "or convert to shards with --order shuffled; print(loader.shuffle_quality()) says more",
            SortedByClass,
            stacklevel=4,  # the line that makes the Loader
        )


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
        if isinstance(names, str) or not isinstance(names, Iterable | None):
            raise UsageError(f'columns must be a list of names, such as ["image"], not {names!r}')
        chosen = stored if names is None else tuple(names)
        for name in chosen:
            if name not in there or chosen.count(name) > 1:
                raise UsageError(f"unknown or repeated column {name!r}; choose from {', '.join(there)}")
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
