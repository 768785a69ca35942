"""From what the user asked of a loader to the parts that do it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

from ..formats.dataset import Dataset
from ..formats.errors import UsageError
from ..formats.index import Rows
from ..formats.pool import usable_cpus
from .epoch import EpochPlan
from .order import Shuffle
from .slots import Field, SlotLayout
from .topology import rank_and_world_size
from .transforms import ArraySpec


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
    """The plan of this process's epochs. Raises UsageError."""
    if not isinstance(shuffle, Shuffle | None):
        raise UsageError(f"shuffle must be LocalShuffle(n), GlobalShuffle() or None, not {shuffle!r}")
    rank, world_size = rank_and_world_size(rank, world_size)
    return EpochPlan(
        dataset=dataset.manifest.root,
        shard_counts=tuple(shard.records for shard in dataset.manifest.shards),
        shuffle=shuffle.in_records(_mean_image(dataset)) if shuffle else None,
        seed=operator.index(seed),
        batch_size=operator.index(batch_size),
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
    )


def layout_of(dataset: Dataset, *, rows: int, outputs: Sequence[ArraySpec] | None) -> SlotLayout:
    """Rows of the declared sizes; for outputs without one, twice the mean image in spare bytes."""
    if outputs is not None:
        return SlotLayout(rows, tuple(Field(spec.name, spec.shape, spec.dtype) for spec in outputs))
    return SlotLayout(rows, (), spare=math.ceil(2 * _mean_image(dataset)))


def worker_count(workers: object) -> int:
    """The number of processes asked for. Raises UsageError."""
    if workers == "auto":
        return usable_cpus()
    if not isinstance(workers, SupportsIndex) or operator.index(workers) < 0:
        raise UsageError(f"workers must be 'auto' or a number from 0 on, not {workers!r}")
    return operator.index(workers)


def key_of(index: Rows, number: int) -> str:
    """The key of a record number."""
    key: bytes = index["key"][number]
    return key.decode()


def _mean_image(dataset: Dataset) -> float:
    return dataset.manifest.image_bytes / len(dataset)
