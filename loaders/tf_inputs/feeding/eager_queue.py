"""A ``tf.queue.FIFOQueue`` of batches, filled from eager code, without copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shardprep.formats.system.owned import Owned
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import Leaves
from shardprep.loaders.tf_inputs.tensors.tensors import empty_tensors

from .end_of_epoch import batch_or_end, shaped
from .sink import SinkClosed, Status


class TensorQueue(Owned):
    """A sink of ``capacity`` elements, for eager code and graphs. Elements share memory with what was put."""

    def __init__(self, specs: Sequence[Any], capacity: int) -> None:
        self.capacity = capacity
        self._specs = specs
        self._closed = False
        self._empty_leaves = empty_tensors(specs)
        with tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(capacity, [tf.uint8, *(spec.dtype for spec in specs)])

    def put(self, status: Status, leaves: Leaves) -> None:
        if self._closed:
            raise SinkClosed
        element = [tf.constant(status, tf.uint8), *(leaves if status == Status.BATCH else self._empty_leaves)]
        try:
            self._queue.enqueue(element)
        except tf.errors.OpError as error:
            raise SinkClosed from error

    def level(self) -> int:
        with tf.init_scope():  # a garbage collection may call this while a graph is being built
            return int(self._queue.size())

    def take(self) -> tuple[Status, Leaves]:
        with tf.init_scope():
            status, *leaves = self._queue.dequeue()
            return Status(int(status)), leaves

    def empty(self) -> None:
        while self.level():
            self.take()

    def dequeue(self, ended: Callable[[int], None]) -> Leaves:
        """The next batch within a graph; the graph calls ``ended`` for an element that is no batch."""
        status, *tensors = self._queue.dequeue()
        with tf.control_dependencies([batch_or_end(status, ended)]):
            return shaped([tf.identity(tensor) for tensor in tensors], self._specs)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with tf.init_scope():
                self._queue.close(cancel_pending_enqueues=True)
            with suppress(tf.errors.OutOfRangeError):  # another thread took the last
                self.empty()
