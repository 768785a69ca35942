"""A queue between the source and the step, filled by a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardprep.loaders.batching.group import Batches, Remainder
from shardprep.loaders.batching.passes import Passes, Source
from shardprep.loaders.tf_inputs.feeding.eager_queue import TensorQueue
from shardprep.loaders.tf_inputs.feeding.feeder import Feeder
from shardprep.loaders.tf_inputs.feeding.graph_sinks import SessionQueue
from shardprep.loaders.tf_inputs.feeding.sink import Sink
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import capacity_of, flat, signature_of
from shardprep.loaders.tf_inputs.tensors.tensors import arrays_of, tensors_of

from .fed_input import FedInput


class QueueInput(FedInput):
    """A ``tf.queue.FIFOQueue`` that a thread fills from ``source``, so that steps do not wait for Python.

    ``source`` is a Loader, another input, any iterable of arrays or of tuples or dicts of arrays, or a
    function that returns such an iterable for each epoch. ``signature`` has a ``tf.TensorSpec`` for each
    part; by default it is the source's, or that of its first batch. ``capacity`` is a number of batches or a
    size (``"512MiB"``); the default is 2 batches. Raises UsageError for arguments that are none of these.

    Made in eager mode, an input can be iterated, and dequeued from in eager code and in ``tf.function``. The
    next epoch begins on request; once a graph dequeues, it begins as soon as the one before is over. Made in
    a v1 graph, the input is dequeued from in that graph, after ``start(session)``. Batches of a Loader, and
    of a source with ``batches_never_change = True``, are not copied. Other sources may reuse their arrays, so
    they are copied.
    """

    def __init__(self, source: Source, *, signature: Any = None, capacity: int | str | None = None) -> None:
        passes = Passes(source)
        element_spec = signature_of(passes, signature)
        queue, feeder = fed_queue(passes, element_spec, capacity_of(passes, capacity, element_spec))
        super().__init__(passes, element_spec, queue, feeder)


class BatchQueueInput(QueueInput):
    """A :class:`QueueInput` over ``records``, a source of single records, in batches of ``batch_size``.

    Each batch is assembled once, in memory that TensorFlow uses without a copy. ``remainder="drop"`` leaves
    out a last batch that is not full, ``"keep"`` delivers it. ``signature`` and ``capacity`` are those of
    batches, as for :class:`QueueInput`. Records of one batch that differ in form raise UsageError.
    """

    def __init__(
        self,
        records: Source,
        batch_size: int,
        *,
        remainder: Remainder = "keep",
        signature: Any = None,
        capacity: int | str | None = None,
    ) -> None:
        super().__init__(
            Batches(records, batch_size, remainder=remainder), signature=signature, capacity=capacity
        )


def fed_queue(
    passes: Passes, element_spec: Any, capacity: int, *, on_close: Callable[[], None] | None = None
) -> tuple[Sink, Feeder]:
    """Return a queue, of eager mode or of the v1 graph that is being built, and its feeder."""
    specs, eager = flat(element_spec), tf.executing_eagerly()
    queue: Sink = TensorQueue(specs, capacity) if eager else SessionQueue(specs, capacity)
    made_of = partial(tensors_of if eager else arrays_of, element_spec, zero_copy=passes.batches_never_change)
    return queue, Feeder(passes, queue, made_of, on_close=on_close)
