"""The form of a source's batches, known before the first one is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.transforms.contract import ArraySpec


@dataclass(frozen=True)
class BatchSpec:
    """One part of a batch: its ``name``, its ``shape`` [rows, …] and its ``dtype``.

    The number of rows is None if it varies. A ``dtype`` of None stands for a list of bytes.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype[Any] | None


def loader_specs(
    outputs: Sequence[ArraySpec] | None, *, rows: int | None, with_numbers: bool
) -> tuple[BatchSpec, ...]:
    """Return the parts of a loader's batches; without ``outputs``, encoded bytes."""
    made = (
        [BatchSpec("image", (rows,), None)]
        if outputs is None
        else [BatchSpec(spec.name, (rows, *spec.shape), np.dtype(spec.dtype)) for spec in outputs]
    )
    names = ("label", "number") if with_numbers else ("label",)
    return (*made, *(BatchSpec(name, (rows,), np.dtype(np.int64)) for name in names))


def full_batch_bytes(specs: Sequence[BatchSpec], rows: int) -> int:
    """Bytes of a batch of ``rows`` rows. Raises UsageError where a part has no fixed size."""
    size = 0
    for spec in specs:
        if spec.dtype is None or None in spec.shape[1:]:
            raise UsageError(f"a capacity in bytes needs rows of fixed size, and those of {spec.name} vary")
        size += rows * math.prod(spec.shape[1:]) * spec.dtype.itemsize  # type: ignore[arg-type]
    return size
