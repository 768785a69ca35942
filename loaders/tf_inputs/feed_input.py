"""Batches without a thread between."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

from ...formats.errors import UsageError
from ..passes import Passes, Source
from .framework import tf
from .gate import end_epoch, gate, shaped, weak
from .occupancy import InputStats, Occupancy, loader_stats
from .pulled_passes import PulledPasses
from .queue_input import arrays_of, tensors_of
from .signature import signature_of
from .sink import Status
from .source_input import SourceInput
from .tensors import blanks


class FeedInput(SourceInput):
    """Draws each batch from the source when the step asks for it: for debugging, and for tiny data.

    ``source`` and ``signature`` are as for :class:`QueueInput`. Made in a v1 graph, ``dequeue`` gives
    placeholders, and iterating it gives the ``feed_dict`` of each batch::

        for feed in feed_input:
            session.run(step, feed)

    In a ``tf.function`` its Python runs within the step. Every step waits, hence counts as starved.
    """

    def __init__(self, source: Source, *, signature: Any = None) -> None:
        passes = Passes(source)
        super().__init__(passes, signature_of(passes, signature))
        self._occupancy = Occupancy()
        self._pulled = PulledPasses(passes)
        self._number: int | None = None  # of the pass that a graph is in
        self._places = None if tf.executing_eagerly() else _placeholders(self.specs)

    def __iter__(self) -> Iterator[Any]:
        if self._places is None and not tf.executing_eagerly():
            raise UsageError("inputs are iterated in eager code; within a tf.function call dequeue()")
        return self._epoch(self._pulled.begin())

    def _epoch(self, number: int) -> Iterator[Any]:
        while (batch := self._counted(number)) is not None:
            made = [self._fed(batch)]
            del batch
            yield made.pop()

    def _fed(self, batch: Any) -> Any:
        if self._places is None:
            return self.packed(tensors_of(self.element_spec, batch, lend=self._passes.batches_never_change))
        return dict(
            zip(
                self._places,
                arrays_of(self.element_spec, batch, lend=self._passes.batches_never_change),
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
        if self._places is not None:
            return self.packed(list(self._places))
        status, *leaves = tf.py_function(
            weak(self._pull), [], [tf.uint8, *(spec.dtype for spec in self.specs)]
        )
        with tf.control_dependencies([gate(status, end_epoch)]):
            return self.packed(shaped([tf.identity(leaf) for leaf in leaves], self.specs))

    def _pull(self) -> list[Any]:
        if self._number is None:
            self._number = self._pulled.begin_for_tensorflow()
        number, self._number = self._number, None
        tensors = self._pulled.next_for_tensorflow(
            number, partial(tensors_of, self.element_spec, lend=self._passes.batches_never_change)
        )
        if tensors is None:
            return [tf.constant(int(Status.END), tf.uint8), *blanks(self.specs)]
        self._number = number
        return [tf.constant(int(Status.BATCH), tf.uint8), *tensors]

    def state_or_none(self) -> Any:
        return self._passes.state()

    def load_state_dict(self, state: Any) -> None:
        """Have the next epoch begin where the state was taken. Raises UsageError where the source has none."""
        self.reset()
        self._passes.load_state(state)

    def reset(self) -> None:
        """Leave the epoch that is under way: the next batch is the first of another."""
        self._drawing = self._number = None

    def stats(self) -> InputStats:
        loader = loader_stats(self._passes.source)
        return self._occupancy.read(type(self).__name__, capacity=0, level=0, loader=loader)

    def close(self) -> None:
        self._drawing = None
        self._pulled.close()


def _placeholders(specs: list[Any]) -> list[Any]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
