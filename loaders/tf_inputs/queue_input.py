"""A queue between the source and the step, filled by a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..batching import Batches, Remainder
from ..passes import Passes, Source
from .fed_input import FedInput
from .feeder import Feeder
from .framework import tf
from .session_sinks import SessionQueue
from .signature import capacity_of, flat, signature_of
from .sink import Leaves, Sink
from .structure import leaves_of
from .tensor_queue import TensorQueue
from .tensors import array_of, tensor_of


class QueueInput(FedInput):
    """A ``tf.queue.FIFOQueue`` that a thread fills from ``source``, so that no step waits for Python.

    ``source`` is a Loader, another input, or any iterable of arrays, or of tuples or dicts of arrays; or a
    function that returns a fresh one for each epoch. ``signature`` has a ``tf.TensorSpec`` for each part; without
    it the source or its first batch tells. ``capacity`` is a number of batches or a size (``"512MiB"``).

    Made in eager mode, it may be iterated, and dequeued from in eager code and in ``tf.function``. The next
    epoch begins when it is asked for, or, once a graph dequeues, as soon as the one before is over. Made in a v1
    graph, it is dequeued from there, after ``start(session)``. A Loader's batches are not copied, nor those of a
    source that says ``batches_never_change = True``; any other source may use its arrays again, so they are copied.
    """

    def __init__(self, source: Source, *, signature: Any = None, capacity: int | str | None = None) -> None:
        passes = Passes(source)
        element_spec = signature_of(passes, signature)
        queue, feeder = fed_queue(passes, element_spec, capacity_of(passes, capacity, element_spec))
        super().__init__(passes, element_spec, queue, feeder)


class BatchQueueInput(QueueInput):
    """The same over a source of single records, which are put together in batches of ``batch_size``.

    Each batch is assembled once, in memory that TensorFlow takes as it is. ``remainder="drop"`` leaves out a
    last batch that is not full. Records of one batch must be equal in form; UsageError otherwise.
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
    """A queue, of eager mode or of the v1 graph that is being built, and what fills it."""
    specs, eager = flat(element_spec), tf.executing_eagerly()
    queue: Sink = TensorQueue(specs, capacity) if eager else SessionQueue(specs, capacity)
    made_of = partial(tensors_of if eager else arrays_of, element_spec, lend=passes.batches_never_change)
    return queue, Feeder(passes, queue, made_of, on_close=on_close)


def tensors_of(element_spec: Any, batch: Any, *, lend: bool) -> Leaves:
    """A batch's parts as eager tensors, in the order of the leaves; ``lend`` what lies so that TensorFlow can take it."""
    parts = leaves_of(element_spec, batch)
    return [tensor_of(part, spec, lend=lend) for part, spec in zip(parts, flat(element_spec), strict=True)]


def arrays_of(element_spec: Any, batch: Any, *, lend: bool) -> Leaves:
    """A batch's parts as arrays that TensorFlow may take as they are."""
    parts = leaves_of(element_spec, batch)
    return [array_of(part, spec, lend=lend) for part, spec in zip(parts, flat(element_spec), strict=True)]
