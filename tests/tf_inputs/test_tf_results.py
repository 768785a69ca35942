"""A Loader of a plain function as a transform: the form of its batches is that of a first batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, TransformInput
from shardprep.loaders.tf_inputs import FeedInput, QueueInput, StagingInput, to_dataset
from support.tf_devices import tf

Rng = np.random.Generator


def image(record: TransformInput, rng: Rng) -> Any:
    return np.full((4, 5, 3), record.label, np.float32)


def named(record: TransformInput, rng: Rng) -> Any:
    return {"image": image(record, rng), "noise": rng.random(2)}


def of_any_size(record: TransformInput, rng: Rng) -> Any:
    return np.zeros(rng.integers(1, 9))


def seldom_larger(record: TransformInput, rng: Rng) -> Any:
    return np.zeros(8 if rng.random() < 0.02 else 7)


def failing(record: TransformInput, rng: Rng) -> Any:
    raise ZeroDivisionError("of the transform")


@pytest.fixture
def loader_of(lmdb_shards: Path) -> Callable[..., Loader]:
    return lambda transform, **options: Loader(
        lmdb_shards, batch_size=32, transform=transform, workers=0, drop_last=False, **options
    )


def rows_of(labels: Any) -> int:
    return sum(int(tf.shape(part)[0]) for part in labels)


@pytest.mark.parametrize("make", [QueueInput, FeedInput, lambda source: StagingInput(QueueInput(source))])
def test_an_input_finds_the_form_out_and_takes_no_batch(
    make: Callable[[Any], Any], loader_of: Callable[..., Loader]
) -> None:
    with loader_of(image) as loader, make(loader) as batches:
        image_spec, label_spec = batches.element_spec
        assert (image_spec.shape.as_list(), image_spec.dtype) == ([None, 4, 5, 3], tf.float32)
        assert (label_spec.shape.as_list(), label_spec.dtype) == ([None], tf.int64)
        assert (loader.epoch, loader.receipt().count) == (0, 0)

        assert rows_of(labels for _, labels in batches) == 204
        loader.receipt().check(204)


def test_a_dict_stays_a_dict(loader_of: Callable[..., Loader]) -> None:
    with loader_of(named) as loader:
        parts, _ = next(iter(to_dataset(loader)))

    assert (parts["image"].shape.as_list(), parts["noise"].shape.as_list()) == ([32, 4, 5, 3], [32, 2])


def test_a_dataset_of_a_resumed_epoch_has_its_length(loader_of: Callable[..., Loader]) -> None:
    with loader_of(image) as before:
        taken = iter(before)
        seen = sum(len(next(taken)[-1]) for _ in range(3))
        state = before.state_dict()

    with loader_of(image) as loader:
        loader.load_state_dict(state)
        dataset = to_dataset(loader)
        assert (seen + rows_of(labels for _, labels in dataset), len(loader)) == (204, 7)
        loader.receipt().check(204)


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


def test_results_that_differ_in_a_later_batch_are_that_error_too(loader_of: Callable[..., Loader]) -> None:
    with (
        loader_of(seldom_larger) as loader,
        QueueInput(loader) as batches,
        pytest.raises(UsageError, match=r"pad or crop .* to one shape"),
    ):
        rows_of(labels for _, labels in batches)


def test_a_transforms_error_comes_as_itself(loader_of: Callable[..., Loader]) -> None:
    with loader_of(failing) as loader, pytest.raises(ZeroDivisionError, match="of the transform"):
        QueueInput(loader)
