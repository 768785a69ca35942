"""Checking a loader's options, and the plan, layout and workers that follow from them."""

from __future__ import annotations

import math
import operator
import os
import resource
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np

from shardprep.formats.dataset.record_set import IndexRows
from shardprep.formats.dataset.remote.open_dataset import url_of
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.formats.system.user_path import user_path
from shardprep.loaders.buffers.slots import SlotField, SlotLayout
from shardprep.loaders.order.class_mixing import ClassMixing, warn_of_few_classes, warn_of_sorted_classes
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.epoch_order import Shuffle
from shardprep.loaders.order.process_ranks.ranks import rank_and_world_size
from shardprep.loaders.order.sampled_mixing import sampled_mixing
from shardprep.loaders.transforms.columns import AsColumns
from shardprep.loaders.transforms.contract import ArraySpec, Transform, outputs_of

from .subset import Subset

ROOM_FOR_ROWS = 4 << 30  # bytes of addresses in each slot; memory is used where rows are written


def place_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the place of a dataset: its URL, or its absolute path."""
    return user_path(path).absolute() if url_of(path) is None else path


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
    """Return the plan of this process's epochs. Raises UsageError."""
    if not isinstance(shuffle, Shuffle | None):
        raise UsageError(f"shuffle must be LocalShuffle(n), GlobalShuffle() or None, not {shuffle!r}")
    rank, world_size = rank_and_world_size(rank, world_size)
    plan = EpochPlan(
        dataset=subset.identity,
        shard_counts=subset.shard_counts,
        shuffle=shuffle.in_records(subset.mean_image) if shuffle else None,
        seed=_integer("seed", seed),
        batch_size=_integer("batch_size", batch_size),
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
    )
    if plan.shuffle:
        _warn_of_bad_mixing(subset, plan, plan.shuffle)
    return plan


def _integer(name: str, value: object) -> int:
    if not isinstance(value, SupportsIndex):
        raise UsageError(f"{name} must be an integer, not {value!r}")
    return operator.index(value)


def check_reading(on_bad_record: object, read_ahead: int) -> None:
    """Raise UsageError for a value that is not valid."""
    if on_bad_record not in ("raise", "skip"):
        raise UsageError(f"on_bad_record must be 'raise' or 'skip', not {on_bad_record!r}")
    if read_ahead < 0:
        raise UsageError(f"read_ahead must be a number of bytes, or 0 for none, not {read_ahead}")


def _warn_of_bad_mixing(subset: Subset, plan: EpochPlan, shuffle: Shuffle) -> None:
    """Warn where batches have few of the classes: by a formula, or where that does not hold by a sample."""
    records, window = len(subset), shuffle.window_of(len(subset))
    in_place, place = subset.dataset.in_place, subset.dataset.location
    if window >= records:
        return
    if subset.dataset.class_sorted:
        classes = len(np.unique(subset.labels))
        mixing = ClassMixing(records, classes, records / len(plan.shard_counts), plan.batch_size)
        instead = "convert it to shards" if in_place else "convert without --order key"
        warn_of_sorted_classes(mixing, window, dataset=plan.dataset, place=place, instead=instead)
    elif subset.has_labels_at_hand and (few := sampled_mixing(plan, subset.labels, window)):
        warn_of_few_classes(
            few.found,
            few.expected,
            window,
            dataset=plan.dataset,
            place=place,
            batch_size=plan.batch_size,
            instead="convert it to shards" if in_place else "write it in a shuffled order",
        )


def layout_of(transform: Transform | None, *, rows: int, mean_bytes: float, workers: int) -> SlotLayout:
    """Return rows of the outputs that are declared, and spare bytes for what is not.

    These are twice the ``mean_bytes`` that are read of a record. For a transform without outputs, workers
    have room for rows of a form that is found in results, except where the system limits addresses: there
    each result is sent.
    """
    spare = math.ceil(2 * mean_bytes)
    if isinstance(transform, AsColumns):
        return SlotLayout(rows, _fields(transform.rows), spare=spare if transform.sent else 0)
    outputs = outputs_of(transform) if transform is not None else None
    if outputs is not None:
        return SlotLayout(rows, _fields(outputs))
    writes_found = transform is not None and workers and _addresses_are_free()
    room = ROOM_FOR_ROWS if writes_found else 0
    return SlotLayout(rows, (), spare=spare, inputs=room, sparse=room > 0)


def _fields(specs: Iterable[ArraySpec]) -> tuple[SlotField, ...]:
    return tuple(SlotField(spec.name, spec.shape, spec.dtype) for spec in specs)


def _addresses_are_free() -> bool:
    limits = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    return all(resource.getrlimit(limit)[0] == resource.RLIM_INFINITY for limit in limits)


def worker_count(workers: object) -> int:
    """Return the number of worker processes. Raises UsageError."""
    if workers == "auto":
        return usable_cpus()
    if not isinstance(workers, SupportsIndex) or operator.index(workers) < 0:
        raise UsageError(f"workers must be 'auto' or a number of at least 0, not {workers!r}")
    return operator.index(workers)


def key_of(index: IndexRows, number: int) -> str:
    """The key of a record number."""
    key: bytes = index["key"][number]
    return key.decode(errors="replace")


def described(item: Any) -> str:
    """The key of an item that is given to a worker."""
    return str(item["key"], errors="replace")
