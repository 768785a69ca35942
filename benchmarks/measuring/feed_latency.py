"""How much of the loading time is hidden behind a step that computes as long as a batch takes to load."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from contenders import feed_ways
from contenders.feed_sources import Batch, Ring

from shardprep.loaders.tf_inputs import QueueInput, StagingInput

SIDE = 512  # of the matrices that the step multiplies
TRIAL = 20  # multiplications that first measure how long one takes
TRIALS = 4  # each of as many steps, closer to the target time


@dataclass(frozen=True)
class Latency:
    """Seconds of an epoch: loading alone, the step alone, and both, by their ways."""

    load: float
    step: float
    inline: float
    queue: float
    staging: float


@tf.function(input_signature=(*feed_ways.SIGNATURE, tf.TensorSpec([], tf.int32)))
def multiply(images: Any, labels: Any, times: Any) -> Any:
    """A step that multiplies a matrix repeatedly and reads every byte of the batch."""
    matrix = tf.fill([SIDE, SIDE], 1 / SIDE)
    for _ in tf.range(times):
        matrix = tf.matmul(matrix, matrix)
    return tf.reduce_sum(matrix) + tf.cast(tf.reduce_sum(images), tf.float32)


def measure(source: Iterable[Batch], batches: int) -> Latency:
    """Measure every figure in this process, one after the other, for epochs of so many batches."""
    batch = next(iter(Ring(length=1)))
    _consume(source, 2)  # the workers are running
    load = _consume(source, batches)
    times = _times_for(batch, load / batches)
    step = _stepped(itertools.repeat(batch), times, batches)
    inline = _stepped(map(_lent, source), times, batches)
    with QueueInput(source, signature=feed_ways.SIGNATURE) as fed:
        queue = _stepped(fed, times, batches)
    with StagingInput(QueueInput(source, signature=feed_ways.SIGNATURE)) as fed:
        staging = _stepped(fed, times, batches)
    return Latency(load, step, inline, queue, staging)


def _consume(source: Iterable[Batch], batches: int) -> float:
    began = time.perf_counter()
    for _ in itertools.islice(source, batches):
        pass
    return time.perf_counter() - began


def _times_for(batch: Batch, seconds: float) -> Any:
    """Number of multiplications that take so long."""
    times = TRIAL
    _stepped([batch], tf.constant(times), 1)
    for _ in range(TRIALS):
        passed = _stepped(itertools.repeat(batch), tf.constant(times), TRIALS) / TRIALS
        times = max(1, round(times * seconds / passed))
    return tf.constant(times)


def _stepped(source: Iterable[Any], times: Any, batches: int) -> float:
    began = time.perf_counter()
    for images, labels in itertools.islice(source, batches):
        multiply(images, labels, times).numpy()
    return time.perf_counter() - began


def _lent(batch: Batch) -> tuple[Any, Any]:
    images, labels = batch
    return tf.experimental.dlpack.from_dlpack(images.__dlpack__()), tf.constant(labels)
