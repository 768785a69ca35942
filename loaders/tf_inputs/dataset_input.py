"""A ``tf.data.Dataset`` as an input."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from time import perf_counter
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.tf_inputs.feeding.end_of_epoch import batch_or_end, end_epoch, shaped
from shardprep.loaders.tf_inputs.feeding.errors import original_errors
from shardprep.loaders.tf_inputs.feeding.graph_sinks import raw_session
from shardprep.loaders.tf_inputs.feeding.occupancy import Occupancy
from shardprep.loaders.tf_inputs.feeding.sink import Status
from shardprep.loaders.tf_inputs.feeding.stats import InputStats
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import flat
from shardprep.loaders.tf_inputs.tensors.tensors import empty_tensors

from .input import Input


class DatasetInput(Input):
    """The elements of ``dataset``, a ``tf.data.Dataset``, as batches; each iteration of it is an epoch.

    It waits within TensorFlow, so Ctrl-C takes effect only between batches. An infinite dataset has one
    endless epoch. In a graph, the prefetching of ``tf.data`` may draw from the next epoch early. Raises
    UsageError if ``dataset`` is no ``tf.data.Dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(f"a DatasetInput takes a tf.data.Dataset, not {type(dataset).__name__}")
        self._dataset = dataset
        self.element_spec = dataset.element_spec
        self._in_session = not tf.executing_eagerly()
        self._occupancy = Occupancy()
        self._closed = False
        self._endless: Any = None  # the iterator that a graph draws from

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        if self._in_session:
            raise UsageError("this input belongs to a v1 graph: call dequeue() there, and start(session)")
        return self._epoch(iter(self._dataset))

    def _epoch(self, batches: Iterator[Any]) -> Iterator[Any]:
        while held := self._next_of(batches):
            yield held.pop()
        self._occupancy.epoch()

    def _next_of(self, batches: Iterator[Any]) -> list[Any]:
        """Return a list with the next batch, for the caller to empty; an empty list at the end."""
        self._check_open()
        began = perf_counter()
        with original_errors():
            held = list(islice(batches, 1))
        self._check_open()
        if held:
            took = perf_counter() - began
            self._occupancy.taken(waited=took)
            self._occupancy.drew(took, 0.0)
        return held

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this input is closed; make a new one")

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of batches of every epoch; None where it is unknown or infinite."""
        cardinality = int(self._dataset.cardinality())
        return cardinality if cardinality >= 0 else None

    def _dequeue_in_graph(self) -> Any:
        self._check_open()
        if self._endless is None:
            self._endless = self._endless_iterator()
        status, *leaves = self._endless.get_next()
        with tf.control_dependencies([batch_or_end(status, end_epoch)]):
            return self.packed(shaped([tf.identity(leaf) for leaf in leaves], self.specs))

    def _endless_iterator(self) -> Any:
        """Return one iterator over all epochs, with an element of empty tensors after each."""
        if self._in_session:
            return tf.compat.v1.data.make_initializable_iterator(self._with_ends())
        with tf.init_scope():
            return iter(self._with_ends())

    def _with_ends(self) -> Any:
        specs = flat(self.element_spec)
        ended = (tf.constant(int(Status.END), tf.uint8), *empty_tensors(specs))

        def marked(*parts: Any) -> Any:
            batch = parts if _is_plain_tuple(self.element_spec) else parts[0]
            return (tf.constant(int(Status.BATCH), tf.uint8), *self.leaves(batch))

        return self._dataset.map(marked).concatenate(tf.data.Dataset.from_tensors(ended)).repeat()

    def start(self, session: Any) -> None:
        if self._in_session and self._endless is not None:
            raw_session(session).run(self._endless.initializer)

    def as_dataset(self, *, prefetch: int = 1) -> Any:
        return self._dataset.prefetch(prefetch) if prefetch else self._dataset

    def stats(self) -> InputStats:
        return self._occupancy.read(type(self).__name__, capacity=0, level=0)

    def close(self) -> None:
        self._closed = True
        self._drawing = self._endless = None


def _is_plain_tuple(spec: Any) -> bool:
    """Whether ``tf.data`` passes elements of this spec to functions as several arguments."""
    return isinstance(spec, tuple) and not hasattr(spec, "_fields")
