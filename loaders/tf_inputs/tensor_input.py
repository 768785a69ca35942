"""Inputs that TensorFlow computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.tf_inputs.feeding.end_of_epoch import batch_or_end, end_epoch, weak
from shardprep.loaders.tf_inputs.feeding.occupancy import Occupancy
from shardprep.loaders.tf_inputs.feeding.sink import Status
from shardprep.loaders.tf_inputs.feeding.stats import InputStats
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import flat, renamed

from .input import Input


class TensorInput(Input):
    """The tensors that ``make()`` returns; it is called for each batch in eager code, once for each graph.

    ``length`` is the number of batches of an epoch; with None an epoch has no end. In a graph, a length costs
    a call of Python per batch. ``signature`` describes what ``make`` returns; by default ``make`` is called
    once to find it. Raises UsageError if ``make`` is no function, or ``length`` negative.
    """

    def __init__(self, make: Callable[[], Any], *, length: int | None = None, signature: Any = None) -> None:
        if not callable(make) or (length is not None and length < 0):
            raise UsageError(
                f"make={make!r}, length={length}: a function that returns tensors, and None or a number"
            )
        self._make = make
        self._length = length
        self.element_spec = signature if signature is not None else _spec_of(make)
        self._occupancy = Occupancy()
        self._left = length  # batches of the epoch that a graph is in
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        made = 0
        while self._length is None or made < self._length:
            self._check_open()
            yield self._timed()
            made += 1
        self._occupancy.epoch()

    def _timed(self) -> Any:
        began = perf_counter()
        batch = self._make()
        took = perf_counter() - began
        self._occupancy.taken(waited=took)
        self._occupancy.drew(took, 0.0)
        return batch

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this input is closed; make a new one")

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this input has no end; give it a length")
        return self._length

    @property
    def batches_per_epoch(self) -> int | None:
        """The length; None without one."""
        return self._length

    def _dequeue_in_graph(self) -> Any:
        self._check_open()
        if self._length is None:
            return self._make()
        status = tf.numpy_function(weak(self._status), [], tf.uint8)
        with tf.control_dependencies([batch_or_end(status, end_epoch)]):
            return tf.nest.map_structure(tf.identity, self._make())

    def _status(self) -> Any:
        """Count a batch that a graph is about to make, or the end of its epoch."""
        is_batch = bool(self._left) and not self._closed
        self._left = self._left - 1 if self._left and is_batch else self._length
        return np.uint8(Status.BATCH if is_batch else Status.END)

    def stats(self) -> InputStats:
        return self._occupancy.read(type(self).__name__, capacity=0, level=0)

    def close(self) -> None:
        self._closed = True
        self._drawing = None


class DummyConstantInput(TensorInput):
    """The same batch of zeros every time, to measure the step alone.

    ``signature`` has a ``tf.TensorSpec`` of known shape for each part; UsageError otherwise. ``length`` is as
    for :class:`TensorInput`.
    """

    def __init__(self, signature: Any, *, length: int | None = None) -> None:
        for spec in flat(signature):
            if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
                raise UsageError(f"a constant needs a tf.TensorSpec of known shape, not {spec!r}")
        kept = _zeros(signature) if tf.executing_eagerly() else None

        def make() -> Any:
            return kept if tf.executing_eagerly() else _zeros(signature)

        super().__init__(make, length=length, signature=signature)


def _zeros(signature: Any) -> Any:
    return renamed(signature, [tf.zeros(spec.shape, spec.dtype) for spec in flat(signature)])


def _spec_of(make: Callable[[], Any]) -> Any:
    with tf.Graph().as_default():  # a graph has the static shapes only
        return tf.nest.map_structure(tf.TensorSpec.from_tensor, make())
