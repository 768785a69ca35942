"""Inputs from elsewhere: a ``tf.data.Dataset``, tensors that TensorFlow computes, or other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.batches.passes import Passes
from shardprep.loaders.frameworks.tensors import capacity_of, empty_tensors, flat, renamed, signature_of, tf
from shardprep.loaders.frameworks.tf_feeding import check
from shardprep.loaders.frameworks.tf_graph import Status, batch_of_element, batch_or_end, raw_session, weak
from shardprep.loaders.frameworks.tf_inputs import DirectInput, FeederInput, fed_queue
from shardprep.loaders.machines.codec import DEFAULT_LIMIT
from shardprep.loaders.machines.frames import FrameReceiver


class DatasetInput(DirectInput):
    """The elements of ``dataset``, a ``tf.data.Dataset``, as batches; each iteration of it is an epoch.

    It waits within TensorFlow, so Ctrl-C takes effect only between batches. An infinite dataset has one
    endless epoch. In a graph, the prefetching of ``tf.data`` may draw from the next epoch early. Raises
    UsageError if ``dataset`` is no ``tf.data.Dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(f"a DatasetInput takes a tf.data.Dataset, not {type(dataset).__name__}")
        super().__init__(Passes(dataset), dataset.element_spec)
        self._dataset = dataset
        self._in_session = not tf.executing_eagerly()
        self._endless: Any = None  # the iterator that a graph draws from

    def __iter__(self) -> Iterator[Any]:
        check(self._closed)
        if self._in_session:
            raise UsageError("this input belongs to a v1 graph: call dequeue() there, and start(session)")
        return self._epoch(iter(self._dataset))

    def _dequeue_in_graph(self) -> Any:
        check(self._closed)
        if self._endless is None:
            make = tf.compat.v1.data.make_initializable_iterator if self._in_session else iter
            with nullcontext() if self._in_session else tf.init_scope():
                self._endless = make(self._with_ends())
        return self.packed(batch_of_element(self._endless.get_next(), self.specs))

    def _with_ends(self) -> Any:
        """Return a dataset of all epochs, with an element of empty tensors after each."""
        specs = flat(self.element_spec)
        ended = (tf.constant(int(Status.END), tf.uint8), *empty_tensors(specs))

        def marked(*parts: Any) -> Any:
            spec = self.element_spec  # of a plain tuple, tf.data passes the parts as arguments
            batch = parts if isinstance(spec, tuple) and not hasattr(spec, "_fields") else parts[0]
            return (tf.constant(int(Status.BATCH), tf.uint8), *self.leaves(batch))

        return self._dataset.map(marked).concatenate(tf.data.Dataset.from_tensors(ended)).repeat()

    def start(self, session: Any) -> None:
        if self._in_session and self._endless is not None:
            raw_session(session).run(self._endless.initializer)

    def to_dataset(self, *, prefetch: int = 1) -> Any:
        return self._dataset.prefetch(prefetch) if prefetch else self._dataset

    def close(self) -> None:
        super().close()
        self._endless = None


class TensorInput(DirectInput):
    """Input of the tensors that ``make()`` returns, called for each batch in eager code, once for each graph.

    Args:
        make: Function that returns the tensors of a batch.
        length: Number of batches of an epoch; None has no end. In a graph, a length costs a call of Python
            per batch.
        signature: A ``tf.TensorSpec`` for each part; None calls ``make`` once to find it.

    Raises:
        UsageError: ``make`` is not a function, or ``length`` is negative.
    """

    def __init__(self, make: Callable[[], Any], *, length: int | None = None, signature: Any = None) -> None:
        if not callable(make) or (length is not None and length < 0):
            raise UsageError(
                f"make={make!r}, length={length}: a function that returns tensors, and None or a number"
            )
        if signature is None:
            with tf.Graph().as_default():  # a graph has the static shapes only
                signature = tf.nest.map_structure(tf.TensorSpec.from_tensor, make())
        super().__init__(Passes(make), signature)
        self._make = make
        self._length = length
        self._left = length  # batches of the epoch that a graph is in

    def __iter__(self) -> Iterator[Any]:
        check(self._closed)
        calls = repeat(None) if self._length is None else repeat(None, self._length)
        return self._epoch(self._make() for _ in calls)  # a StopIteration of its own is an error

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this input is endless; give it a length")
        return self._length

    @property
    def batches_per_epoch(self) -> int | None:
        """The length; None without one."""
        return self._length

    def _dequeue_in_graph(self) -> Any:
        check(self._closed)
        if self._length is None:
            return self._make()
        status = tf.numpy_function(weak(self._status), [], tf.uint8)
        with tf.control_dependencies([batch_or_end(status)]):
            return tf.nest.map_structure(tf.identity, self._make())

    def _status(self) -> Any:
        """Count a batch that a graph is about to make, or the end of its epoch."""
        is_batch = bool(self._left) and not self._closed
        self._left = self._left - 1 if self._left and is_batch else self._length
        return np.uint8(Status.BATCH if is_batch else Status.END)


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


class ZMQInput(FeederInput):
    """A ``tf.queue.FIFOQueue`` of the batches that :func:`.frames.send_batches` sends to ``endpoint``.

    An epoch is over when each sender has sent its own epoch. It is used as :class:`QueueInput` is, in eager
    mode and in v1 graphs. Batches are received into memory that TensorFlow uses without a copy. Closing the
    input frees the endpoint and wakes waiting threads. There is no authentication: use an endpoint on
    loopback or in a trusted network.

    Args:
        endpoint: As for :class:`.frames.FrameReceiver`, which this input owns.
        signature: A ``tf.TensorSpec`` for each part of a batch. It must be given, because waiting for a first
            batch would hang where no sender comes.
        senders: Number of senders of an epoch.
        capacity: Number of batches, or a size such as "512MiB" where the signature leaves no dimension open;
            None is 2 batches.
        bind: As for :class:`.frames.FrameReceiver`.
        limit_bytes: As for :class:`.frames.FrameReceiver`.

    Raises:
        UsageError: An argument is not valid. In a step: a batch does not match the signature.
        SenderFailed: In a step: a sender failed or is gone.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        signature: Any,
        *,
        senders: int = 1,
        capacity: int | str | None = None,
        bind: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
    ) -> None:
        if signature is None:
            raise UsageError("give a signature: it is not known before a sender has sent a batch")
        receiver = FrameReceiver(endpoint, senders=senders, bind=bind, limit_bytes=limit_bytes)
        try:
            passes = Passes(receiver)
            element_spec = signature_of(passes, signature)
            room = capacity_of(passes, capacity, element_spec, waits=False)
            queue, feeder = fed_queue(passes, element_spec, room, on_close=receiver.close)
        except BaseException:
            receiver.close()
            raise
        self._receiver = receiver
        super().__init__(passes, element_spec, queue, feeder)

    def close(self) -> None:
        self._receiver.close()  # first: otherwise the senders would see an epoch ended early, and begin the next
        super().close()

    @property
    def endpoint(self) -> str:
        """The address for senders, with the port that was chosen for ``*``."""
        return self._receiver.endpoint

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All addresses for senders."""
        return self._receiver.endpoints

    @property
    def rejected(self) -> int:
        """The number of messages that were dropped: damaged, or not from an accepted sender."""
        return self._receiver.rejected
