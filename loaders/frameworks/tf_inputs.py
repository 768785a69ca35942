"""Inputs for training steps: from a source, a dataset, TensorFlow itself or other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, repeat, takewhile
from multiprocessing.util import Finalize
from time import perf_counter
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.owners import Closable, Owner
from shardprep.formats.runtime.progress import check_int
from shardprep.loaders.batches.passes import Passes, Source
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.sources import FromIterable
from shardprep.loaders.flow.steps import Remainder
from shardprep.loaders.frameworks.tensors import (
    Leaves,
    array_of,
    capacity_of,
    empty_tensors,
    flatten,
    leaves_of,
    make_leaves,
    signature_of,
    tensor_of,
    tf,
    unflatten,
)
from shardprep.loaders.frameworks.tf_feeding import Feeder, PulledPasses, original_errors
from shardprep.loaders.frameworks.tf_graph import (
    SessionStage,
    Sink,
    StagingAreas,
    Status,
    TensorQueue,
    batch_of_element,
    check_use,
    hold_weakly,
    raw_session,
    require_batch,
    set_shapes,
)
from shardprep.loaders.frameworks.tf_stats import InputStats, Occupancy
from shardprep.loaders.machines.codec import DEFAULT_LIMIT
from shardprep.loaders.machines.frames import FrameReceiver

AT_EXIT = 15  # the priority of closing pulled passes: before TensorFlow's threads end


def to_dataset(source: Source, *, signature: Any = None, prefetch: int = 0) -> Any:
    """Return a ``tf.data.Dataset`` of the source's batches, for ``model.fit`` and ``tf.data``'s own steps.

    Each iteration of the dataset is a new epoch of the source, and ends the epoch before. The cardinality is
    set and asserted if every epoch has the same known length. A Loader's batches are not copied. Steps that
    keep batches (``cache``, ``shuffle``, ``list(dataset)``) keep its slots; the Loader then begins to copy.

    A source's error is raised as TensorFlow's, with its text; ``with original_errors():`` raises the
    original. ``tf.distribute`` does not shard the dataset: each worker's loader has its own rank.

    Args:
        source: As for :class:`.QueueInput`.
        signature: As for :class:`.QueueInput`; it becomes ``element_spec``.
        prefetch: Number of batches that ``tf.data`` draws ahead. The source's state counts them as delivered,
            so a run that resumes within an epoch misses them.

    Raises:
        UsageError: The signature is neither given nor known, or ``prefetch`` is not a number.
    """
    prefetch, passes = check_int(prefetch, "prefetch", least=tf.data.AUTOTUNE), Passes(source)
    dataset = _make_dataset(passes, signature_of(passes, signature))
    if (length := passes.fixed_length) is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False  # only ``prefetch`` batches are drawn ahead
    return (dataset.prefetch(prefetch) if prefetch else dataset).with_options(options)


def _make_dataset(source: Passes, element_spec: Any) -> Any:
    """Return a dataset with one element, which begins a pass and is flat-mapped to its batches."""
    specs, passes = flatten(element_spec), PulledPasses(source, element_spec)
    begin_pass, pull = hold_weakly(passes.begin_for_tensorflow), hold_weakly(passes.next_for_tensorflow)

    def pull_element(number: Any) -> Any:
        status, *leaves = tf.py_function(pull, [number], [tf.uint8, *(spec.dtype for spec in specs)])
        status.set_shape([])
        return status, *leaves

    def to_batch(_: Any, *leaves: Any) -> Any:
        return unflatten(element_spec, set_shapes(leaves, specs))

    def batches(number: Any) -> Any:
        counter = tf.data.Dataset.counter().map(lambda _: pull_element(number))
        return counter.take_while(lambda status, *_: tf.equal(status, int(Status.BATCH))).map(to_batch)

    started = tf.data.Dataset.from_tensors(0).map(lambda _: tf.numpy_function(begin_pass, [], tf.int64))
    started.shardprep_passes = passes  # datasets made from this one keep it alive
    Finalize(started, passes.close, exitpriority=AT_EXIT)
    return started.flat_map(batches)


class Input(Owner, Closable, ABC):
    """Batches as TensorFlow tensors, in the form of ``element_spec``, epoch after epoch.

    Iterating an input in eager code is one epoch: errors of the source are raised unchanged, Ctrl-C works,
    and leaving the loop ends the epoch. :meth:`dequeue` returns the next batch in eager code, in a
    ``tf.function`` or in a v1 graph, and raises ``tf.errors.OutOfRangeError`` at the end of each epoch. In a
    graph, a source's error is raised as TensorFlow's; ``with original_errors():`` raises the original.
    ``len()`` is the number of batches of the next epoch, if the source knows it.

    A context manager. Closing is idempotent, in any thread and any state; dropping the input or ending the
    interpreter closes it, too. One thread at a time may draw from it. Neither copyable nor picklable.
    """

    copy_advice = "make the input where it is needed, over a source of its own"

    element_spec: Any
    _passes: Passes
    _eager_epoch: Iterator[Any] | None = None  # of dequeue() in eager code
    _in_session: bool | None = None  # whether it was made in a v1 graph; None if that does not matter

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""

    def __len__(self) -> int:
        """Return the number of batches of the next epoch. Raises TypeError if it is not known."""
        return len(self._passes)

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches of every epoch; None if it is unknown or infinite."""
        return self._passes.fixed_length

    def dequeue(self) -> Any:
        """Return the next batch. Raises OutOfRangeError at the end of an epoch."""
        if self._in_session is False and not tf.compat.v1.executing_eagerly_outside_functions():
            raise UsageError("this input was made in eager mode: make it within the v1 graph")
        if not tf.executing_eagerly():
            return self._dequeue_in_graph()
        epoch, self._eager_epoch = self._eager_epoch or iter(self), None
        for batch in epoch:
            self._eager_epoch = epoch
            return batch
        raise tf.errors.OutOfRangeError(None, None, "the epoch is over; the next call begins another")

    @abstractmethod
    def _dequeue_in_graph(self) -> Any:
        """Return the next batch as tensors of the graph that is being built."""

    @abstractmethod
    def stats(self) -> InputStats:
        """Return the counts and times since the input was made. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Stop, wake waiting threads, and drop all batches. Idempotent."""

    def state_or_none(self) -> Any:
        """Return the source's state; None for a source without one."""
        return None

    def state_dict(self) -> Any:
        """Return the source's state. Raises UsageError for a source without one."""
        state = self.state_or_none()
        if state is None:
            raise UsageError(
                "the source of this input has no state; give a QueueInput a Loader, or a Flow with items by number"
            )
        return state

    def start(self, session: Any) -> None:
        """Start an input of a v1 graph in this session. Does nothing in eager mode."""

    def to_dataset(self, *, prefetch: int = 0) -> Any:
        """Return a ``tf.data.Dataset`` for ``model.fit``, each iteration of which is an epoch of this input.

        ``prefetch`` is as for :func:`to_dataset`.
        """
        return to_dataset(self, prefetch=prefetch)

    @property
    def specs(self) -> list[Any]:
        """The leaves of ``element_spec``."""
        return flatten(self.element_spec)

    def leaves(self, batch: Any) -> list[Any]:
        """Return the parts of a batch in the order of the leaves."""
        return leaves_of(self.element_spec, batch)

    def packed(self, leaves: list[Any]) -> Any:
        """Return leaves in the form of ``element_spec``."""
        return unflatten(self.element_spec, leaves)


class DirectInput(Input):
    """An input without a thread. Each step waits while its batch is made, and so counts as starved."""

    def __init__(self, passes: Passes, element_spec: Any) -> None:
        self._passes, self.element_spec = passes, element_spec
        self._occupancy = Occupancy()
        self._closed = False

    def _epoch(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            check_use(self._closed)
            began = perf_counter()
            with original_errors():
                drawn = list(islice(batches, 1))
            check_use(self._closed)
            if not drawn:
                break
            took = perf_counter() - began
            self._occupancy.count_step(waited=took)
            self._occupancy.count_draw(took, 0.0)
            yield drawn.pop()  # keeping a reference would hold the slot during the next wait
        self._occupancy.count_epoch()

    def stats(self) -> InputStats:
        return self._occupancy.read(type(self).__name__, source=self._passes.source)

    def close(self) -> None:
        self._closed = True
        self._eager_epoch = None


class FeederInput(Input):
    """An input over a sink and the feeder that fills it; in a v1 graph :meth:`start` starts the feeder.

    ``state_dict`` is the source's state as of the last batch that this input delivered, whatever the sink
    holds. ``load_state_dict`` sets the source's state for the next epoch. Both raise UsageError if a graph
    dequeues.
    """

    def __init__(self, passes: Passes, element_spec: Any, feeder: Feeder) -> None:
        self._passes, self.element_spec = passes, element_spec
        self._sink: Any = feeder.sink  # that of a v1 graph also has attach()
        self._feeder = feeder
        self._in_session = not tf.executing_eagerly()
        # multiprocessing's finalizer runs before an engine stops its workers, while threads can be joined
        Finalize(self, feeder.close, exitpriority=20)

    def __iter__(self) -> Iterator[Any]:
        if self._in_session:
            raise UsageError("this input belongs to a v1 graph: call dequeue() there, and start(session)")
        if not tf.executing_eagerly():
            raise UsageError("inputs are iterated in eager code; within a tf.function call dequeue()")
        return self._epoch(self._feeder.begin())

    def _epoch(self, epoch_number: int) -> Iterator[Any]:
        try:
            while (leaves := self._feeder.take(epoch_number)) is not None:
                batch = [self._eager_batch(leaves)]
                del leaves
                yield batch.pop()  # keeping a reference would hold the slot during the next wait
        finally:
            self._feeder.leave(epoch_number)

    def _dequeue_in_graph(self) -> Any:
        if self._in_session:
            self._feeder.check_open()
            self._feeder.unseen = True
        else:
            self._feeder.hand_to_graph()
        return self.packed(self._sink.dequeue(hold_weakly(self._feeder.report_end)))

    def _eager_batch(self, leaves: Leaves) -> Any:
        """Return the batch of an element's leaves for eager code."""
        return self.packed(leaves)

    def start(self, session: Any) -> None:
        if self._in_session:
            self._sink.attach(session)
            self._feeder.hand_to_graph()

    def reset(self) -> None:
        """End the current epoch early: the next batch is the first of another epoch."""
        self._eager_epoch = None
        self._feeder.restart()

    def state_or_none(self) -> Any:
        return self._feeder.state()

    def load_state_dict(self, state: Any, **options: Any) -> None:
        self._eager_epoch = None
        self._feeder.load_state(state, **options)

    def stats(self) -> InputStats:
        return self._feeder.occupancy.read(
            type(self).__name__,
            capacity=self._sink.capacity,
            level=self._sink.level(),
            source=self._passes.source,
        )

    def close(self) -> None:
        self._eager_epoch = None
        self._feeder.close()  # not the finalizer, which an interruption would use up


class FeedInput(DirectInput):
    """Draws each batch from ``source`` when the step requests it: for debugging, and for small data.

    ``source`` and ``signature`` are as for :class:`QueueInput`. Made in a v1 graph, ``dequeue`` returns
    placeholders, and iterating the input yields the ``feed_dict`` of each batch::

        for feed in feed_input:
            session.run(step, feed)

    In a ``tf.function``, the source's Python code runs within the step. Every step waits for its batch, so
    every step counts as starved. Raises UsageError if the signature is neither given nor known.
    """

    def __init__(self, source: Source, *, signature: Any = None) -> None:
        passes = Passes(source)
        super().__init__(passes, signature_of(passes, signature))
        self._pulled = PulledPasses(passes, self.element_spec)
        Finalize(self, self._pulled.close, exitpriority=AT_EXIT)
        self._graph_pass: int | None = None  # number of the pass that a graph dequeues from
        self._placeholders: list[Any] | None = None
        if not tf.executing_eagerly():
            self._placeholders = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in self.specs]

    def __iter__(self) -> Iterator[Any]:
        if self._placeholders is None and not tf.executing_eagerly():
            raise UsageError("inputs are iterated in eager code; within a tf.function call dequeue()")
        return self._epoch(map(self._convert, self._pass(self._pulled.begin())))

    def _pass(self, number: int) -> Iterator[Any]:
        try:
            yield from takewhile(lambda batch: batch is not None, map(self._pulled.next, repeat(number)))
        finally:
            self._pulled.leave(number)

    def _convert(self, batch: Any) -> Any:
        convert, spec = tensor_of if self._placeholders is None else array_of, self.element_spec
        leaves = make_leaves(convert, spec, batch, zero_copy=self._passes.batches_never_change)
        if self._placeholders is None:
            return self.packed(leaves)
        return dict(zip(self._placeholders, leaves, strict=True))

    def _dequeue_in_graph(self) -> Any:
        if self._placeholders is not None:
            return self.packed(list(self._placeholders))
        dtypes = [tf.uint8, *(spec.dtype for spec in self.specs)]
        return self.packed(batch_of_element(tf.py_function(hold_weakly(self._pull), [], dtypes), self.specs))

    def _pull(self) -> list[Any]:
        if self._graph_pass is None:
            self._graph_pass = self._pulled.begin_for_tensorflow()
        number, self._graph_pass = self._graph_pass, None
        element = self._pulled.next_for_tensorflow(number)
        if int(element[0]) == Status.BATCH:
            self._graph_pass = number
        return element

    def state_or_none(self) -> Any:
        return self._passes.state()

    def load_state_dict(self, state: Any, **options: Any) -> None:
        """Make the next epoch begin where the state was taken. Raises UsageError for a source without one."""
        self.reset()
        self._passes.load_state(state, **options)

    def reset(self) -> None:
        """End the current epoch early: the next batch is the first of another epoch."""
        self._eager_epoch = self._graph_pass = None
        self._pulled.leave()

    def close(self) -> None:
        super().close()
        self._pulled.close()


class QueueInput(FeederInput):
    """A ``tf.queue.FIFOQueue`` that a thread fills from ``source``, so that steps do not wait for Python.

    Made in eager mode, an input can be iterated, and dequeued from in eager code and in ``tf.function``. The
    next epoch begins on request or, once a graph dequeues, as soon as the one before is over. Made in a v1
    graph, the input is dequeued from in that graph, after ``start(session)``. Batches of a Loader, and of a
    source with ``batches_never_change = True``, are not copied. Other sources may reuse their arrays, so
    their batches are copied.

    Args:
        source: A Loader, another input, any iterable of arrays or of tuples or dicts of arrays, or a function
            that returns such an iterable for each epoch.
        signature: A ``tf.TensorSpec`` for each part of a batch, by default from the source or its first
            batch.
        capacity: Number of batches, or a size such as "512MiB"; 2 batches by default.

    Raises:
        UsageError: An argument is not valid.
    """

    def __init__(self, source: Source, *, signature: Any = None, capacity: int | str | None = None) -> None:
        super().__init__(*make_feeder(Passes(source), signature, capacity))


class BatchQueueInput(QueueInput):
    """A :class:`QueueInput` over a source of single records, which it batches.

    Each batch is assembled once, in memory that TensorFlow uses without a copy.

    Args:
        records: A source of single records, as for :class:`QueueInput`.
        batch_size: Records per batch.
        remainder: "keep" delivers a last batch that is not full, "drop" omits it, and "pad" fills it with
            zeros and adds a mask to every batch, as :meth:`.Flow.batch` does.
        signature: Signature of the batches, as for :class:`QueueInput`.
        capacity: Capacity of the queue, as for :class:`QueueInput`.

    Raises:
        UsageError: An argument is not valid. While iterating: records of one batch differ in form.
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
        if not isinstance(records, Flow) or records.state_or_none() != Flow(records.node).state_dict():
            records = Flow(FromIterable(Passes(records)))  # continues where a flow is
        self._batches = records.batch(batch_size, remainder=remainder)
        super().__init__(self._batches, signature=signature, capacity=capacity)

    def close(self) -> None:
        super().close()
        self._batches.close()


def make_feeder(
    passes: Passes,
    signature: Any,
    capacity: int | str | None,
    *,
    waits: bool = True,
    on_close: Callable[[], None] | None = None,
) -> tuple[Passes, Any, Feeder]:
    """Return the parts of a FeederInput with a queue, for eager mode or the v1 graph that is being built.

    ``waits`` is as for :func:`capacity_of`, ``on_close`` as for a Feeder.
    """
    element_spec = signature_of(passes, signature)
    queue = TensorQueue(flatten(element_spec), capacity_of(passes, capacity, element_spec, waits=waits))
    convert = tensor_of if tf.executing_eagerly() else array_of
    convert_batch = partial(make_leaves, convert, element_spec, zero_copy=passes.batches_never_change)
    return passes, element_spec, Feeder(passes, queue, convert_batch, on_close=on_close)


class StagingInput(FeederInput):
    """A staging area of ``depth`` batches on each device, which a thread fills from ``source``.

    With ``strategy``, each batch is the global batch: every replica gets its part of the rows, on its own
    device; if the rows do not divide evenly, the first replicas get one row more. Iterating then yields
    values for ``strategy.run(step, args=batch)``, and in a graph ``dequeue`` belongs in the replica's
    function.

    A Loader's default ``slots`` suffice for depth 1 over a queue of 2. Each further batch needs one more
    slot, or batches are copied. All batches of an epoch are delivered. Batches on the device are not copied.
    Made in a v1 graph, it wraps an input of that graph, on one device, and starts that input, too.

    Args:
        source: Another input, which is closed together with this one, or any source for :class:`QueueInput`.
        device: Name of the device, by default the first GPU, or the CPU.
        strategy: A ``tf.distribute.Strategy`` in place of ``device``.
        depth: Number of batches on each device, at least 1.
        signature: As for :class:`QueueInput`.

    Raises:
        UsageError: An argument is not valid.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: str | None = None,
        strategy: Any = None,
        depth: int = 1,
        signature: Any = None,
    ) -> None:
        check_int(depth, "a depth", least=1)
        if device and strategy:
            raise UsageError(f"a strategy has its own devices: leave out device={device!r}")
        self._strategy = strategy
        self._wrapped = source if isinstance(source, Input) else None
        passes = Passes(source)
        element_spec = signature_of(passes, signature)
        if strategy:
            devices = list(strategy.extended.worker_devices)
        else:
            gpus = [] if device else tf.config.list_logical_devices("GPU")
            devices = [device or (gpus[0].name if gpus else "CPU:0")]
        specs, on_close = flatten(element_spec), self._wrapped.close if self._wrapped is not None else None
        sink: Sink
        if tf.executing_eagerly():
            sink = StagingAreas([_part_spec(spec, len(devices)) for spec in specs], devices, depth, strategy)
            split = partial(_split, element_spec, len(devices), passes.batches_never_change)
            feeder = Feeder(passes, sink, split, on_close=on_close)
        elif self._wrapped is None or isinstance(self._wrapped, FeedInput) or len(devices) > 1:
            raise UsageError(
                "in a v1 graph, give a StagingInput another input, such as a QueueInput but no FeedInput, and one device"
            )
        else:
            batch = [tf.convert_to_tensor(leaf) for leaf in self._wrapped.leaves(self._wrapped.dequeue())]
            sink = SessionStage(specs, batch, devices[0], depth)
            endless = Passes(partial(_endless_pass, self._wrapped, sink))
            feeder = Feeder(endless, sink, lambda _: [], on_close=on_close)
        super().__init__(passes, element_spec, feeder)

    def _eager_batch(self, leaves: Leaves) -> Any:
        if not self._strategy:
            return self.packed(leaves[0])
        distributed = self._strategy.experimental_distribute_values_from_function
        columns = map(iter, zip(*leaves, strict=True))
        return self.packed([distributed(lambda _, parts=column: next(parts)) for column in columns])

    def start(self, session: Any) -> None:
        if self._wrapped is not None:
            self._wrapped.start(session)
        super().start(session)

    def to_dataset(self, *, prefetch: int = 0) -> Any:
        if self._strategy:
            raise UsageError(
                "batches on several devices cannot be a dataset; give the wrapped input's dataset to the strategy"
            )
        return super().to_dataset(prefetch=prefetch)


def _endless_pass(wrapped: Input, stage: SessionStage) -> Iterator[None]:
    """Return an endless pass, whose end the stage finds. Reset the input if its last pass ended early."""
    if stage.is_in_pass:
        reset = getattr(wrapped, "reset", None)
        if not callable(reset):
            raise UsageError(f"a {type(wrapped).__name__} cannot leave an epoch early in a graph")
        reset()
    return repeat(None)


def _part_spec(spec: Any, parts: int) -> Any:
    """Return the spec of one replica's rows."""
    if parts == 1 or not spec.shape.rank:
        return spec
    rows, *sides = spec.shape.as_list()
    return tf.TensorSpec([rows // parts if rows and rows % parts == 0 else None, *sides], spec.dtype)


def _split(element_spec: Any, parts: int, zero_copy: bool, batch: Any) -> list[Leaves]:
    """Return one list of leaves for each device, with the rows divided as evenly as possible."""
    leaves = make_leaves(tensor_of, element_spec, batch, zero_copy=zero_copy)
    return [[_part_rows(leaf, part, parts) for leaf in leaves] for part in range(parts)]


def _part_rows(leaf: Any, part: int, parts: int) -> Any:
    if parts == 1 or not leaf.shape.rank:
        return leaf
    share, more = divmod(int(leaf.shape[0]), parts)
    first = part * share + min(part, more)
    return leaf[first : first + share + (part < more)]


class DatasetInput(DirectInput):
    """The elements of ``dataset``, a ``tf.data.Dataset``, as batches; each iteration of it is an epoch.

    Waits happen within TensorFlow, so Ctrl-C takes effect only between batches. An infinite dataset has one
    endless epoch. In a graph, the prefetching of ``tf.data`` may draw early from the next epoch. Raises
    UsageError if ``dataset`` is not a ``tf.data.Dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(f"a DatasetInput takes a tf.data.Dataset, not {type(dataset).__name__}")
        super().__init__(Passes(dataset), dataset.element_spec)
        self._dataset = dataset
        self._in_session = not tf.executing_eagerly()
        self._graph_iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        check_use(self._closed)
        if self._in_session:
            raise UsageError("this input belongs to a v1 graph: call dequeue() there, and start(session)")
        return self._epoch(iter(self._dataset))

    def _dequeue_in_graph(self) -> Any:
        check_use(self._closed)
        if self._graph_iterator is None:
            make = tf.compat.v1.data.make_initializable_iterator if self._in_session else iter
            with nullcontext() if self._in_session else tf.init_scope():
                # endless epochs, each followed by an element of empty tensors
                ended = (tf.constant(int(Status.END), tf.uint8), *empty_tensors(self.specs))
                epoch = self._dataset.map(self._mark).concatenate(tf.data.Dataset.from_tensors(ended))
                self._graph_iterator = make(epoch.repeat())
        return self.packed(batch_of_element(self._graph_iterator.get_next(), self.specs))

    def _mark(self, *parts: Any) -> Any:
        spec = self.element_spec  # tf.data passes the parts of a plain tuple as arguments
        batch = parts if isinstance(spec, tuple) and not hasattr(spec, "_fields") else parts[0]
        return (tf.constant(int(Status.BATCH), tf.uint8), *self.leaves(batch))

    def start(self, session: Any) -> None:
        if self._in_session and self._graph_iterator is not None:
            raw_session(session).run(self._graph_iterator.initializer)

    def to_dataset(self, *, prefetch: int = 0) -> Any:
        return self._dataset.prefetch(prefetch) if prefetch else self._dataset

    def close(self) -> None:
        super().close()
        self._graph_iterator = None


class TensorInput(DirectInput):
    """The tensors that ``make()`` returns, which is called per batch in eager code, and once per graph.

    Args:
        make: Function that returns the tensors of a batch.
        length: Number of batches of an epoch; by default it has no end. In a graph, a length costs a Python
            call per batch.
        signature: A ``tf.TensorSpec`` for each part, by default from an extra call of ``make``.

    Raises:
        UsageError: ``make`` is not a function, or ``length`` not a number of 0 or more.
    """

    def __init__(self, make: Callable[[], Any], *, length: int | None = None, signature: Any = None) -> None:
        if not callable(make):
            raise UsageError(f"make must be a function that returns tensors, not {make!r}")
        length = None if length is None else check_int(length, "length", least=0)
        if signature is None:
            with tf.Graph().as_default():  # for static shapes only
                signature = tf.nest.map_structure(tf.TensorSpec.from_tensor, make())
        super().__init__(Passes(partial(repeat, None) if length is None else range(length)), signature)
        self._make = make
        self._length = length
        self._remaining = length  # batches of the epoch that a graph is in

    def __iter__(self) -> Iterator[Any]:
        check_use(self._closed)
        calls = self._passes.begin()
        return self._epoch(self._make() for _ in calls)  # in a generator, its StopIteration is an error

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this input is endless; give it a length")
        return self._length

    def _dequeue_in_graph(self) -> Any:
        check_use(self._closed)
        if self._length is None:
            return self._make()
        status = tf.numpy_function(hold_weakly(self._status), [], tf.uint8)
        with tf.control_dependencies([require_batch(status)]):
            return tf.nest.map_structure(tf.identity, self._make())

    def _status(self) -> Any:
        """Return the status of the graph's next element, and count it."""
        check_use(self._closed)
        is_batch = bool(self._remaining)
        self._remaining = self._remaining - 1 if self._remaining else self._length
        return np.uint8(Status.BATCH if is_batch else Status.END)


class DummyConstantInput(TensorInput):
    """The same batch of zeros every time, to measure the step alone.

    ``signature`` has a ``tf.TensorSpec`` for each part; raises UsageError if a shape is not known. ``length``
    is as for :class:`TensorInput`.
    """

    def __init__(self, signature: Any, *, length: int | None = None) -> None:
        for spec in flatten(signature):
            if not spec.shape.is_fully_defined():
                raise UsageError(f"a constant needs a tf.TensorSpec of known shape, not {spec!r}")
        zeros = unflatten(signature, [tf.zeros(spec.shape, spec.dtype) for spec in flatten(signature)])
        super().__init__(lambda: zeros, length=length, signature=signature)


class ZMQInput(FeederInput):
    """A ``tf.queue.FIFOQueue`` of the batches that :func:`.frames.send_batches` sends to ``endpoint``.

    An epoch is over when each sender has sent its own epoch. Use it like a :class:`QueueInput`, in eager mode
    and in v1 graphs. Batches are received into memory that TensorFlow uses without a copy. Closing the input
    frees the endpoint and wakes waiting threads. There is no authentication: use an endpoint on loopback or
    in a trusted network.

    Args:
        endpoint: As for :class:`.frames.FrameReceiver`, which this input owns. The attribute ``endpoint`` has
            the address for senders, with the port chosen for ``*``, and ``endpoints`` all addresses.
        signature: A ``tf.TensorSpec`` for each part of a batch. It is required, because without a sender,
            waiting for a first batch would hang.
        senders: Number of senders per epoch.
        capacity: Number of batches, or a size such as "512MiB" if the signature leaves no dimension open; 2
            batches by default.
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
            parts = make_feeder(Passes(receiver), signature, capacity, waits=False, on_close=receiver.close)
        except BaseException:
            receiver.close()
            raise
        self._receiver = receiver
        self.endpoint, self.endpoints = receiver.endpoint, receiver.endpoints
        super().__init__(*parts)

    def close(self) -> None:
        self._receiver.close()  # first, or the senders would see an epoch end early, and begin the next
        super().close()

    @property
    def rejected(self) -> int:
        """Number of dropped messages: damaged, or not from an admitted sender."""
        return self._receiver.rejected
