"""A Loader of a plain function as a transform: the form of its batches is that of a first batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, TransformInput
from shardprep.loaders.tf_inputs import QueueInput
from support.tf_devices import tf

Rng = np.random.Generator


def image(record: TransformInput, rng: Rng) -> Any:
    return np.full((4, 5, 3), record.label, np.float32)


def of_any_size(record: TransformInput, rng: Rng) -> Any:
    return np.zeros(rng.integers(1, 9))


@pytest.fixture
def loader_of(lmdb_shards: Path) -> Callable[..., Loader]:
    return lambda transform, **options: Loader(
        lmdb_shards, batch_size=32, transform=transform, workers=0, drop_last=False, **options
    )


def rows_of(labels: Any) -> int:
    return sum(int(tf.shape(part)[0]) for part in labels)


def test_a_capacity_in_bytes_counts_those_of_the_first_batch(loader_of: Callable[..., Loader]) -> None:
    row = 4 * 5 * 3 * 4 + 8
    with loader_of(image) as loader, QueueInput(loader, capacity=f"{3 * 32 * row} B") as batches:
        assert batches.stats().capacity == 3
        assert rows_of(labels for _, labels in batches) == 204


def test_results_of_different_shapes_are_an_error_that_says_what_to_do(
    loader_of: Callable[..., Loader],
) -> None:
    with loader_of(of_any_size) as loader, pytest.raises(UsageError, match=r"pad or crop .* to one shape"):
        QueueInput(loader)
