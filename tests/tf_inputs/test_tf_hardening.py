"""Regression tests from hostile use of the inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader
from shardprep.loaders.tf_inputs import (
    FeedInput,
    QueueInput,
    StagingInput,
    original_errors,
    to_dataset,
)
from support.loader_workers import Tagging
from support.tf_devices import tf


def test_an_input_belongs_to_one_session() -> None:
    with tf.Graph().as_default(), QueueInput([np.arange(3)]) as batches:
        batches.dequeue()
        with tf.compat.v1.Session() as session:
            batches.start(session)
        with tf.compat.v1.Session() as other, pytest.raises(UsageError, match="another session"):
            batches.start(other)


@pytest.mark.parametrize(
    ("number", "dtype"), [(300, tf.int8), (2**40, tf.int32), (1.5, tf.int32), (-1, tf.uint8)]
)
def test_numbers_that_do_not_fit_the_signature_are_an_error(number: float, dtype: Any) -> None:
    with (
        QueueInput([([number],)], signature=(tf.TensorSpec([1], dtype),)) as batches,
        pytest.raises(UsageError, match="signature"),
    ):
        list(batches)


def test_iterating_while_a_function_is_traced_is_an_error_that_says_what_to_do() -> None:
    with QueueInput([np.zeros(2)]) as batches:

        @tf.function(autograph=False)
        def step() -> Any:
            return next(iter(batches))

        with pytest.raises(UsageError, match="call dequeue"):
            step()


def test_a_dataset_that_is_iterated_twice_at_once_says_so() -> None:
    dataset = to_dataset([np.arange(2)] * 6, prefetch=0)
    with pytest.raises(UsageError, match="another iteration"), original_errors():
        list(tf.data.Dataset.zip((dataset, dataset)))


def test_a_stage_over_an_input_without_a_thread_knows_the_loaders_state(lmdb_shards: Any) -> None:
    with (
        Loader(lmdb_shards, batch_size=4, transform=Tagging(), workers=1, rank=0, world_size=1) as loader,
        StagingInput(FeedInput(loader)) as batches,
    ):
        next(iter(batches))
        assert batches.state_dict()["place"] == 4
