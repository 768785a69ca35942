"""TensorFlow's queues and staging areas, in which each pass has an end that the step can see.

A wait in ``Stage`` or ``Unstage`` cannot be interrupted. So each staging area has two queues, whose closing
ends a wait: the thread that stages an element first takes a permit, of which each free place has one; a step
first takes a token, which is put after its element.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.frameworks.tensors import Leaves, empty_tensors, tf

LOCK_TIMEOUT_S = 5.0  # the longest wait for the lock, which other threads hold only briefly
REPLICAS_TIMEOUT_S = 1.0  # the first replica's longest wait for the others, which may lack a thread
PERMIT = np.uint8(0)

_numbers = itertools.count(1)


class Status(IntEnum):
    """The kind of an element: a batch, or the end of a pass."""

    BATCH = 0
    END = 1
    ERROR = 2


class SinkClosed(Exception):
    """The sink is closed."""


class PassEnded(Exception):
    """The attempt to put an element showed that the pass has ended."""


class Sink(ABC):
    """A first-in, first-out store of elements between one thread that puts and one that takes."""

    capacity: int

    @abstractmethod
    def put(self, status: Status, leaves: Leaves) -> None:
        """Wait for room and put an element; only a batch has ``leaves``. Raises SinkClosed, PassEnded."""

    @abstractmethod
    def level(self) -> int:
        """Return the number of elements that can be taken without waiting."""

    @abstractmethod
    def take(self) -> tuple[Status, Leaves]:
        """Return the next element. The sink must not be empty."""

    @abstractmethod
    def dequeue(self, on_end: Callable[[int], None]) -> Leaves:
        """Return the next batch in a graph, which calls ``on_end`` for an element that is no batch."""

    @abstractmethod
    def empty(self) -> None:
        """Drop all elements. No thread may take at the same time; one may wait to put."""

    @abstractmethod
    def close(self) -> None:
        """Drop all elements and wake waiting threads. Idempotent."""


def check_use(is_closed: bool, is_current: bool = True) -> None:
    """Raise UsageError if an input is closed, or another iteration of it has begun."""
    if is_closed:
        raise UsageError("this input is closed; make a new one")
    if not is_current:
        raise UsageError("another iteration of this input has begun; end the first, or use two inputs")


@contextmanager
def closing_lock(changed: threading.Condition) -> Iterator[bool]:
    """Hold the condition's lock, then wake all waiting threads. Yields whether the lock is held.

    A garbage collection may close an input in any thread, at any point. The wait for the lock is limited,
    because the thread that holds it may wait for something that this thread holds.
    """
    is_held = changed.acquire(timeout=LOCK_TIMEOUT_S)
    try:
        yield is_held
    finally:
        if is_held:
            changed.notify_all()
            changed.release()


def hold_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the method, and holds only a weak reference to its object.

    TensorFlow keeps functions forever. The function raises UsageError when the object is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()  # not in the condition: AutoGraph warns of an assignment there
        if bound is None:
            raise UsageError("this belongs to an input that is gone; keep the input as long as it is used")
        return bound(*args)

    return call


def end_epoch(status: int) -> None:
    """Raise StopIteration, the default at the end of an epoch."""
    raise StopIteration


def require_batch(status: Any, on_end: Callable[[int], None] = end_epoch) -> Any:
    """Return a tensor for a control dependency: True if ``status`` means a batch.

    Otherwise the graph calls ``on_end(status)``, which raises; TensorFlow turns StopIteration into
    OutOfRangeError. If another replica's call raises instead, the tensor is False. A batch costs one
    comparison; Python code runs only at the end of a pass.
    """

    def call_on_end(value: Any) -> bool:
        on_end(int(value))
        return False

    with tf.device("CPU:0"):
        return tf.cond(
            tf.equal(status, int(Status.BATCH)),
            lambda: tf.constant(True),
            lambda: tf.numpy_function(call_on_end, [status], tf.bool),
        )


def set_shapes(tensors: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    """Set the static shapes of the tensors, and return them."""
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(tensors)


def batch_of_element(element: Any, specs: list[Any], on_end: Callable[[int], None] = end_epoch) -> list[Any]:
    """Return the tensors of an element, without its status; the graph calls ``on_end`` if it is no batch."""
    status, *tensors = element
    with tf.control_dependencies([require_batch(status, on_end)]):
        return set_shapes([tf.identity(tensor) for tensor in tensors], specs)


def dequeue_when_ready(queue: Any, check_ready: Callable[[], None]) -> Any:
    """Dequeue in a graph: one comparison and, if the queue is empty, ``check_ready``, which may raise."""
    ready = hold_weakly(check_ready)
    with tf.device("CPU:0"):
        is_ready = tf.cond(
            tf.equal(queue.size(), 0),
            lambda: tf.numpy_function(lambda: ready() is None, [], tf.bool),
            lambda: tf.constant(True),
        )
    with tf.control_dependencies([is_ready]):
        return queue.dequeue()


def raw_session(session: Any) -> Any:
    """Return the session without the hooks of a monitored session, which are for training steps only."""
    run_step_fn = getattr(session, "run_step_fn", None)
    return run_step_fn(lambda step_context: step_context.session) if callable(run_step_fn) else session


class OpSink(Sink):
    """Base of sinks made of operations, which run eagerly, or in a session after :meth:`attach`."""

    def __init__(self) -> None:
        self._in_session = not tf.executing_eagerly()
        self._ops: dict[str, tuple[Any, list[Any]]] = {}  # the fetches, and the placeholders to feed
        self._callables: dict[str, Callable[..., Any]] = {}
        self._closed = False

    def _add(self, name: str, operate: Callable[..., Any], *dtypes: Any) -> None:
        """Add an operation whose arguments have these dtypes."""
        if self._in_session:
            placeholders = [tf.compat.v1.placeholder(dtype) for dtype in dtypes]
            self._ops[name] = operate(*placeholders), placeholders
        else:
            self._callables[name] = tf.init_scope()(operate)  # a garbage collection may run it within a graph

    def attach(self, session: Any) -> None:
        """Use this session. Raises UsageError for a second session."""
        if self._callables:
            raise UsageError(
                "this input is already started; make one for each session (a StagingInput starts what it wraps)"
            )
        raw = raw_session(session)
        self._callables = {name: raw.make_callable(*op) for name, op in self._ops.items()}

    def _check_ready(self) -> None:
        check_use(self._closed)
        if not self._callables:
            raise UsageError("nothing feeds this input yet; call its start(session) before the first step")

    def level(self) -> int:
        try:
            return int(self._run("size"))
        except SinkClosed:
            return 0

    def empty(self) -> None:
        while self.level():
            self.take()

    def close(self) -> None:
        try:
            self._run("close")
            self.empty()
        except (SinkClosed, tf.errors.OpError):
            return  # no session was attached, it is closed, or another thread took the last element
        finally:
            self._closed = True

    def _run(self, name: str, *values: Any) -> Any:
        if self._closed or not self._callables:
            raise SinkClosed
        try:
            return self._callables[name](*values)
        except (RuntimeError, tf.errors.CancelledError, tf.errors.AbortedError) as error:
            raise SinkClosed from error  # RuntimeError: the session was closed


class TensorQueue(OpSink):
    """A ``FIFOQueue`` of ``capacity`` elements, for eager mode or the v1 graph that is being built.

    An array that is aligned to 64 bytes is not copied; TensorFlow keeps its memory until the last use.
    """

    def __init__(self, specs: list[Any], capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._specs = specs
        with tf.device("CPU:0"):
            queue = self._queue = tf.queue.FIFOQueue(capacity, [tf.uint8, *(spec.dtype for spec in specs)])
            self._add("put", lambda *values: queue.enqueue(values), *queue.dtypes)
            self._add("end", lambda status: queue.enqueue([status, *empty_tensors(specs)]), tf.uint8)
            self._add("take", queue.dequeue)
            self._add("size", queue.size)
            self._add("close", partial(queue.close, cancel_pending_enqueues=True))

    def put(self, status: Status, leaves: Leaves) -> None:
        self._run("put" if leaves else "end", int(status), *leaves)

    def take(self) -> tuple[Status, Leaves]:
        status, *leaves = self._run("take")
        return Status(int(status)), leaves

    def dequeue(self, on_end: Callable[[int], None]) -> Leaves:
        return batch_of_element(dequeue_when_ready(self._queue, self._check_ready), self._specs, on_end)


class _Area:
    """A staging area on ``device``, with its tokens and permits."""

    def __init__(self, specs: Sequence[Any], device: str, token: Any) -> None:
        self.device = device
        self._dtypes = [spec.dtype for spec in specs]
        self._name = f"shardprep-stage-{os.getpid()}-{next(_numbers)}"
        with tf.device("CPU:0"):  # unbounded: after a failed step there may be one element more than places
            self.tokens = tf.queue.FIFOQueue(-1, [token])
            self.permits = tf.queue.FIFOQueue(-1, [tf.uint8], shapes=[[]])

    def stage(self, leaves: Sequence[Any]) -> Any:
        with tf.device(self.device):
            return tf.raw_ops.Stage(values=leaves, shared_name=self._name)

    def unstage(self) -> Leaves:
        """Take the element of a token that was taken before, and free its place."""
        with tf.device(self.device):
            parts = tf.raw_ops.Unstage(dtypes=self._dtypes, shared_name=self._name)
        with tf.control_dependencies(parts), tf.device("CPU:0"):
            permit = self.permits.enqueue(PERMIT)
        with tf.control_dependencies([permit]), tf.device(self.device):
            return [tf.identity(part) for part in parts]

    def clear(self, places: int) -> None:
        """Drop all elements, in eager mode, and provide one permit per place.

        A thread that waits for a permit gets one of these, which leaves one place too many until the next
        call.
        """
        while int(self.tokens.size()):
            self.tokens.dequeue()
        with tf.device(self.device):
            tf.raw_ops.StageClear(dtypes=self._dtypes, shared_name=self._name)
        while int(self.permits.size()) < places:
            self.permits.enqueue(PERMIT)
        while int(self.permits.size()) > places:
            self.permits.dequeue()


class SessionStage(OpSink):
    """A staging area on ``device`` that stages ``batch``, tensors of another input, without Python code."""

    def __init__(self, specs: Sequence[Any], batch: Sequence[Any], device: str, depth: int) -> None:
        super().__init__()
        self.capacity = depth
        self._specs = specs
        self.is_in_pass = False  # within a pass of the other input
        area = self._area = _Area(specs, device, tf.uint8)
        with tf.device(device):
            staged = area.stage([tf.identity(leaf) for leaf in batch])
        with tf.control_dependencies([staged]):
            self._add("stage", lambda: area.tokens.enqueue(tf.constant(int(Status.BATCH), tf.uint8)))
        with tf.device("CPU:0"):
            self._add("end", area.tokens.enqueue, tf.uint8)
        self._add("permit", lambda: area.permits.enqueue(PERMIT))
        self._add("room", area.permits.dequeue)
        self._add("token", area.tokens.dequeue)
        self._add("unstage", area.unstage)
        self._add("size", area.tokens.size)
        queues = area.tokens, area.permits
        self._add("close", lambda: [queue.close(cancel_pending_enqueues=True) for queue in queues])

    def attach(self, session: Any) -> None:
        super().attach(session)
        for _ in range(self.capacity):
            self._run("permit")

    def put(self, status: Status, leaves: Leaves) -> None:
        if status != Status.BATCH:
            self._run("end", int(status))
            return
        try:
            self._run("room")
        except tf.errors.OutOfRangeError as error:
            raise SinkClosed from error
        try:
            self._run("stage")
            self.is_in_pass = True
        except tf.errors.OpError as error:
            self.is_in_pass = False
            self._run("permit")
            if isinstance(error, tf.errors.OutOfRangeError):
                raise PassEnded from error
            raise

    def take(self) -> tuple[Status, Leaves]:
        status = Status(int(self._run("token")))
        return status, self._run("unstage") if status == Status.BATCH else []

    def dequeue(self, on_end: Callable[[int], None]) -> Leaves:
        token = dequeue_when_ready(self._area.tokens, self._check_ready)
        with tf.control_dependencies([require_batch(token, on_end)]):
            return set_shapes(self._area.unstage(), self._specs)


class StagingAreas(Sink):
    """A sink of ``depth`` elements, each with one part per device.

    The leaves of an element are one list per device. They are copied to the device unless they are there.
    With a ``strategy``, each of its replicas on this machine dequeues from its own device.
    """

    def __init__(
        self, specs: Sequence[Any], devices: Sequence[str], depth: int, strategy: Any = None
    ) -> None:
        self.capacity = depth
        self._specs = specs
        self._strategy = strategy
        self._reported = 0  # the token of the last reported end
        self._changed = threading.Condition()
        self._closed = False
        self._pass = 1
        self._is_over = True  # whether the last element put was the end of a pass
        self._areas = [_Area(specs, device, tf.int64) for device in devices]

    def put(self, status: Status, leaves: Leaves) -> None:
        if self._is_over:
            self.empty()  # a step that failed may have left elements
        number = 0 if status == Status.BATCH else self._pass * len(Status) + status  # same for all devices
        token = tf.constant(number, tf.int64)
        self._is_over = status != Status.BATCH
        self._pass += self._is_over
        parts: list[Any] = []
        for area, part in zip(self._areas, leaves, strict=True) if status == Status.BATCH else ():
            with tf.device(area.device):
                parts.append([tf.identity(value) for value in part])
        try:
            for area in self._areas[: len(parts)]:
                area.permits.dequeue()
            with self._changed:  # not while another thread empties
                if self._closed:
                    raise SinkClosed
                for area, part in zip_longest(self._areas, parts):
                    if part is not None:
                        area.stage(part)
                    area.tokens.enqueue(token)
        except tf.errors.OpError as error:
            if not self._closed:
                raise
            raise SinkClosed from error

    def level(self) -> int:
        with tf.init_scope():  # a garbage collection may call this while a graph is being built
            return int(self._areas[-1].tokens.size())

    def take(self) -> tuple[Status, list[Any]]:
        with tf.init_scope():
            status, *_ = [_status(int(area.tokens.dequeue())) for area in self._areas]
            return status, [area.unstage() for area in self._areas] if status == Status.BATCH else []

    def empty(self) -> None:
        with self._changed, tf.init_scope():
            if not self._closed:
                for area in self._areas:
                    area.clear(self.capacity)

    def dequeue(self, on_end: Callable[[int], None]) -> Leaves:
        report_end, area = partial(hold_weakly(self._report_end), on_end), self._areas[self._replica_index()]
        with tf.device("CPU:0"):
            is_batch = require_batch(dequeue_when_ready(area.tokens, self._check_ready), report_end)
        return set_shapes(tf.cond(is_batch, area.unstage, lambda: empty_tensors(self._specs)), self._specs)

    def _check_ready(self) -> None:
        check_use(self._closed)

    def _replica_index(self) -> int:
        """Return the index, on this machine, of the replica that is being traced."""
        if not self._strategy:
            return 0
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self._strategy:
            raise UsageError("with a strategy, dequeue belongs in the function given to strategy.run")
        number = context.replica_id_in_sync_group
        return int(tf.get_static_value(number)) if tf.is_tensor(number) else int(number)

    def _report_end(self, on_end: Callable[[int], None], token: int) -> None:
        """Report the end of a pass once, when all replicas have taken it.

        The report is an exception, which aborts the step of all replicas; an end that is not taken by then
        would remain for the next pass.
        """
        with self._changed:
            is_first, self._reported = token != self._reported, token
        if is_first:
            deadline = time.monotonic() + REPLICAS_TIMEOUT_S
            while time.monotonic() < deadline:
                with self._changed:
                    if not any(int(area.tokens.size()) for area in self._areas):
                        break
                time.sleep(0.0005)
            on_end(_status(token))

    def close(self) -> None:
        """Drop all elements and wake waiting threads. Idempotent; a garbage collection may call it."""
        with closing_lock(self._changed):
            if self._closed:
                return
            self._closed = True
        with tf.init_scope():
            for area in self._areas:
                area.tokens.close(cancel_pending_enqueues=True)
                with suppress(tf.errors.OutOfRangeError):  # a step took the last element
                    while int(area.tokens.size()):  # a step that has a token finds its part
                        if _status(int(area.tokens.dequeue())) == Status.BATCH:
                            area.unstage()
                area.permits.enqueue(PERMIT)  # wakes the thread that waits for room, which finds this closed


def _status(token: int) -> Status:
    return Status(token % len(Status))
