"""An input without a thread."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import Passes, Source
from shardprep.loaders.tf_inputs.feeding.end_of_epoch import batch_or_end, end_epoch, shaped, weak
from shardprep.loaders.tf_inputs.feeding.occupancy import Occupancy
from shardprep.loaders.tf_inputs.feeding.pulled_passes import PulledPasses
from shardprep.loaders.tf_inputs.feeding.sink import Status
from shardprep.loaders.tf_inputs.feeding.stats import InputStats
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import signature_of
from shardprep.loaders.tf_inputs.tensors.tensors import arrays_of, empty_tensors, tensors_of

from .input import SourceInput


class FeedInput(SourceInput):
    """Draws each batch from ``source`` when the step asks for it: for debugging, and for small data.

    ``source`` and ``signature`` are as for :class:`QueueInput`. Made in a v1 graph, ``dequeue`` returns
    placeholders, and iterating the input yields the ``feed_dict`` of each batch::

        for feed in feed_input:
            session.run(step, feed)

    In a ``tf.function``, the source's Python code runs within the step. Every step waits for its batch, so
    every step counts as starved. Raises UsageError where the signature is neither given nor known.
    """

    def __init__(self, source: Source, *, signature: Any = None) -> None:
        passes = Passes(source)
        super().__init__(passes, signature_of(passes, signature))
        self._occupancy = Occupancy()
        self._pulled = PulledPasses(passes)
        self._number: int | None = None  # the number of the pass that a graph dequeues from
        self._placeholders = None if tf.executing_eagerly() else _placeholders_for(self.specs)

    def __iter__(self) -> Iterator[Any]:
        if self._placeholders is None and not tf.executing_eagerly():
            raise UsageError("inputs are iterated in eager code; within a tf.function call dequeue()")
        return self._epoch(self._pulled.begin())

    def _epoch(self, number: int) -> Iterator[Any]:
        while (batch := self._counted(number)) is not None:
            made = [self._fed(batch)]
            del batch
            yield made.pop()

    def _fed(self, batch: Any) -> Any:
        if self._placeholders is None:
            return self.packed(
                tensors_of(self.element_spec, batch, zero_copy=self._passes.batches_never_change)
            )
        return dict(
            zip(
                self._placeholders,
                arrays_of(self.element_spec, batch, zero_copy=self._passes.batches_never_change),
                strict=True,
            )
        )

    def _counted(self, number: int) -> Any:
        began = perf_counter()
        batch = self._pulled.next(number)
        if batch is None:
            self._occupancy.epoch()
        else:
            took = perf_counter() - began
            self._occupancy.taken(waited=took)
            self._occupancy.drew(took, 0.0)
        return batch

    def _dequeue_in_graph(self) -> Any:
        if self._placeholders is not None:
            return self.packed(list(self._placeholders))
        status, *leaves = tf.py_function(
            weak(self._pull), [], [tf.uint8, *(spec.dtype for spec in self.specs)]
        )
        with tf.control_dependencies([batch_or_end(status, end_epoch)]):
            return self.packed(shaped([tf.identity(leaf) for leaf in leaves], self.specs))

    def _pull(self) -> list[Any]:
        if self._number is None:
            self._number = self._pulled.begin_for_tensorflow()
        number, self._number = self._number, None
        tensors = self._pulled.next_for_tensorflow(
            number, partial(tensors_of, self.element_spec, zero_copy=self._passes.batches_never_change)
        )
        if tensors is None:
            return [tf.constant(int(Status.END), tf.uint8), *empty_tensors(self.specs)]
        self._number = number
        return [tf.constant(int(Status.BATCH), tf.uint8), *tensors]

    def state_or_none(self) -> Any:
        return self._passes.state()

    def load_state_dict(self, state: Any) -> None:
        """Begin the next epoch where the state was taken. Raises UsageError if the source has no state."""
        self.reset()
        self._passes.load_state(state)

    def reset(self) -> None:
        """End the current epoch early: the next batch is the first of another epoch."""
        self._drawing = self._number = None

    def stats(self) -> InputStats:
        return self._occupancy.read(type(self).__name__, capacity=0, level=0, source=self._passes.source)

    def close(self) -> None:
        self._drawing = None
        self._pulled.close()


def _placeholders_for(specs: list[Any]) -> list[Any]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
