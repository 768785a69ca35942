"""The ways of a batch to a training step that only consumes it; each yields the rows of every step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from contenders.feed_sources import ROWS, SHAPE, Batch, endless

from shardprep.loaders.tf_inputs import Input, QueueInput, StagingInput

SIGNATURE = (tf.TensorSpec([None, *SHAPE[1:]], tf.uint8), tf.TensorSpec([None], tf.int64))

Step = Callable[..., Any]
Rows = Iterator[int]


@tf.function(input_signature=SIGNATURE)
def every_byte(images: Any, labels: Any) -> Any:
    """The sum of the whole batch: the rate is limited by memory bandwidth."""
    return tf.reduce_sum(images)


@tf.function(input_signature=SIGNATURE)
def a_byte_each(images: Any, labels: Any) -> Any:
    """The sum of one byte of every image: almost no work."""
    return tf.reduce_sum(images[:, 0, 0, 0])


def numpy_only(source: Iterable[Batch], step: Step) -> Rows:
    """No step at all: the rate of the source."""
    for images, _ in endless(source):
        yield len(images)


def inline(source: Iterable[Batch], step: Step) -> Rows:
    """The step between two batches, on the batch's own memory."""
    lend = tf.experimental.dlpack.from_dlpack
    for images, labels in endless(source):
        step(lend(images.__dlpack__()), tf.constant(labels)).numpy()
        yield len(images)


def converted(source: Iterable[Batch], step: Step) -> Rows:
    for images, labels in endless(source):
        step(tf.convert_to_tensor(images), tf.convert_to_tensor(labels)).numpy()
        yield len(images)


def generator_of_copies(source: Iterable[Batch], step: Step) -> Rows:
    """The usual way: a generator that makes each batch in new memory."""
    yield from _generated(lambda: ((images.copy(), labels) for images, labels in source), step)


def generator_of_slots(source: Iterable[Batch], step: Step) -> Rows:
    """A generator of the source's own arrays, which are aligned, so that TensorFlow need not copy them."""
    yield from _generated(lambda: iter(source), step)


def _generated(batches: Callable[[], Iterator[Batch]], step: Step) -> Rows:
    dataset = tf.data.Dataset.from_generator(batches, output_signature=SIGNATURE)
    yield from _iterated(dataset.prefetch(1), step)


def queue(source: Iterable[Batch], step: Step) -> Rows:
    with QueueInput(source, signature=SIGNATURE) as batches:
        yield from _iterated(batches, step)


def staging(source: Iterable[Batch], step: Step) -> Rows:
    with StagingInput(QueueInput(source, signature=SIGNATURE)) as batches:
        yield from _iterated(batches, step)


def queue_dataset(source: Iterable[Batch], step: Step) -> Rows:
    with QueueInput(source, signature=SIGNATURE) as batches:
        yield from _iterated(batches.to_dataset(), step)


def queue_in_graph(source: Iterable[Batch], step: Step) -> Rows:
    with QueueInput(source, signature=SIGNATURE) as batches:
        yield from _dequeued(batches, step)


def staging_in_graph(source: Iterable[Batch], step: Step) -> Rows:
    with StagingInput(QueueInput(source, signature=SIGNATURE)) as batches:
        yield from _dequeued(batches, step)


def _iterated(batches: Iterable[Any], step: Step) -> Rows:
    for images, labels in endless(batches):
        step(images, labels).numpy()
        yield ROWS


def _dequeued(batches: Input, step: Step) -> Rows:
    @tf.function
    def dequeue_and_step() -> Any:
        return step(*batches.dequeue())

    while True:
        try:
            dequeue_and_step().numpy()
        except tf.errors.OutOfRangeError:
            continue
        yield ROWS
