"""Checking a loader's options, and the plan, layout and workers that follow from them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.dataset.index import Rows
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.loaders.buffers.slots import Field, SlotLayout
from shardprep.loaders.order.class_mixing import ClassMixing, warn_of_sorted_classes
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.epoch_order import Shuffle
from shardprep.loaders.order.ranks import rank_and_world_size
from shardprep.loaders.transforms.contract import ArraySpec


def plan_of(
    dataset: Dataset,
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
        dataset=dataset.manifest.root,
        shard_counts=tuple(shard.records for shard in dataset.manifest.shards),
        shuffle=shuffle.in_records(_mean_image(dataset)) if shuffle else None,
        seed=operator.index(seed),
        batch_size=operator.index(batch_size),
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
    )
    if plan.shuffle and dataset.manifest.class_sorted:
        _warn_of_sorted_classes(dataset, plan, plan.shuffle)
    return plan


def _warn_of_sorted_classes(dataset: Dataset, plan: EpochPlan, shuffle: Shuffle) -> None:
    records, classes = len(dataset), len(np.unique(dataset.index["label"]))
    mixing = ClassMixing(records, classes, records / len(plan.shard_counts), plan.batch_size)
    window = shuffle.window_of(records)
    warn_of_sorted_classes(mixing, window, dataset=plan.dataset, place=str(dataset.path))


def layout_of(dataset: Dataset, *, rows: int, outputs: Sequence[ArraySpec] | None) -> SlotLayout:
    """Return rows of the declared sizes; without ``outputs``, spare bytes of twice the mean image."""
    if outputs is not None:
        return SlotLayout(rows, tuple(Field(spec.name, spec.shape, spec.dtype) for spec in outputs))
    return SlotLayout(rows, (), spare=math.ceil(2 * _mean_image(dataset)))


def worker_count(workers: object) -> int:
    """Return the number of worker processes. Raises UsageError."""
    if workers == "auto":
        return usable_cpus()
    if not isinstance(workers, SupportsIndex) or operator.index(workers) < 0:
        raise UsageError(f"workers must be 'auto' or a number of at least 0, not {workers!r}")
    return operator.index(workers)


def key_of(index: Rows, number: int) -> str:
    """The key of a record number."""
    key: bytes = index["key"][number]
    return key.decode(errors="replace")


def described(item: Any) -> str:
    """The key of an item that is given to a worker."""
    return str(item["key"], errors="replace")


def _mean_image(dataset: Dataset) -> float:
    return dataset.manifest.image_bytes / len(dataset)
