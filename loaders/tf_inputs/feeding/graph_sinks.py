"""A queue and a stage in a v1 graph, which are built with the graph and fed by a session."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.system.owned import Owned
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import Leaves
from shardprep.loaders.tf_inputs.tensors.tensors import empty_arrays

from .end_of_epoch import batch_or_end, shaped
from .sink import PassEnded, SinkClosed, Status

BATCH = int(Status.BATCH)
PERMIT = np.uint8(0)

_numbers = itertools.count(1)


def raw_session(session: Any) -> Any:
    """Return the session, without the hooks of a monitored session, which count training steps only."""
    run_step_fn = getattr(session, "run_step_fn", None)
    return run_step_fn(lambda step_context: step_context.session) if callable(run_step_fn) else session


class SessionSink(Owned, ABC):
    """The common part of sinks in a v1 graph: operations that a session runs, after :meth:`attach`."""

    capacity: int

    def __init__(self) -> None:
        self._runs: dict[str, Callable[..., Any]] = {}
        self._closed = False

    def attach(self, session: Any) -> None:
        """Use this session. Raises UsageError for a second session."""
        if self._runs:
            raise UsageError("this input was started in another session; make a new one for each session")
        raw = raw_session(session)
        self._runs = {name: raw.make_callable(*op) for name, op in self._operations().items()}

    @abstractmethod
    def _operations(self) -> dict[str, tuple[Any, list[Any]]]:
        """The operations by name, as fetches and the placeholders to feed."""

    @abstractmethod
    def dequeue(self, ended: Callable[[int], None]) -> Leaves:
        """The next batch within the graph; the graph calls ``ended`` for an element that is no batch."""

    def level(self) -> int:
        try:
            return int(self._run("size"))
        except SinkClosed:
            return 0

    @abstractmethod
    def take(self) -> tuple[Status, Leaves]:
        """Return the next element. The sink must not be empty."""

    def empty(self) -> None:
        while self.level():
            self.take()

    def close(self) -> None:
        try:
            self._run("close")
            self.empty()
        except (SinkClosed, tf.errors.OpError):
            return  # there was no session, or it is closed together with its elements
        finally:
            self._closed = True

    def _run(self, name: str, *fed: Any) -> Any:
        if self._closed or not self._runs:
            raise SinkClosed
        try:
            return self._runs[name](*fed)
        except (RuntimeError, tf.errors.CancelledError, tf.errors.AbortedError) as error:
            raise SinkClosed from error  # RuntimeError: the session was closed


class SessionQueue(SessionSink):
    """A ``FIFOQueue`` fed with arrays.

    An array that is aligned to 64 bytes is not copied; TensorFlow keeps its memory until the last use.
    """

    def __init__(self, specs: Sequence[Any], capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._specs = specs
        self._empty_leaves = empty_arrays(specs)
        with tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(capacity, [tf.uint8, *(spec.dtype for spec in specs)])
            self._placeholders = [tf.compat.v1.placeholder(t) for t in self._queue.dtypes]
            self._made = {
                "put": (self._queue.enqueue(self._placeholders), self._placeholders),
                "take": (list(self._queue.dequeue()), []),
                "size": (self._queue.size(), []),
                "close": (self._queue.close(cancel_pending_enqueues=True), []),
            }

    def _operations(self) -> dict[str, tuple[Any, list[Any]]]:
        return self._made

    def put(self, status: Status, leaves: Leaves) -> None:
        self._run("put", int(status), *(leaves if status == Status.BATCH else self._empty_leaves))

    def take(self) -> tuple[Status, Leaves]:
        status, *leaves = self._run("take")
        return Status(int(status)), leaves

    def dequeue(self, ended: Callable[[int], None]) -> Leaves:
        status, *tensors = self._queue.dequeue()
        with tf.control_dependencies([batch_or_end(status, ended)]):
            return shaped([tf.identity(tensor) for tensor in tensors], self._specs)


class SessionStage(SessionSink):
    """A staging area on ``device`` for ``batch``, the tensors of another input, without Python between.

    A queue of permits counts the free places: waiting in ``Stage`` itself would block one of the session's
    few threads.
    """

    def __init__(self, specs: Sequence[Any], batch: Sequence[Any], device: str, depth: int) -> None:
        super().__init__()
        self.capacity = depth
        self._specs = specs
        self._device = device
        self.is_within = False  # within a pass of the other input
        self._area = {
            "capacity": depth,
            "shared_name": f"shardprep-session-stage-{os.getpid()}-{next(_numbers)}",
        }
        self._dtypes = [spec.dtype for spec in specs]
        with tf.device("CPU:0"):  # one more place, for the end of a pass
            self._tokens = tf.queue.FIFOQueue(depth + 1, [tf.uint8])
            self._permits = tf.queue.FIFOQueue(depth, [tf.uint8], shapes=[[]])
            status = tf.compat.v1.placeholder(tf.uint8, [])
        with tf.device(device):
            staged = tf.raw_ops.Stage(values=[tf.identity(leaf) for leaf in batch], **self._area)
        with tf.control_dependencies([staged]):
            stage = self._tokens.enqueue(tf.constant(BATCH, tf.uint8))
        queues = self._tokens, self._permits
        self._made = {
            "permit": (self._permits.enqueue(PERMIT), []),
            "room": (self._permits.dequeue(), []),
            "stage": (stage, []),
            "end": (self._tokens.enqueue(status), [status]),
            "token": (self._tokens.dequeue(), []),
            "unstage": (self._unstage(), []),
            "size": (self._tokens.size(), []),
            "close": ([queue.close(cancel_pending_enqueues=True) for queue in queues], []),
        }

    def attach(self, session: Any) -> None:
        super().attach(session)
        for _ in range(self.capacity):
            self._run("permit")

    def _operations(self) -> dict[str, tuple[Any, list[Any]]]:
        return self._made

    def put(self, status: Status, leaves: Leaves) -> None:
        if status != Status.BATCH:
            self._run("end", int(status))
            return
        self._await_room()
        try:
            self._run("stage")
            self.is_within = True
        except tf.errors.OpError as error:
            self.is_within = False
            self._run("permit")
            if isinstance(error, tf.errors.OutOfRangeError):
                raise PassEnded from error
            raise

    def _await_room(self) -> None:
        try:
            self._run("room")
        except tf.errors.OutOfRangeError as error:
            raise SinkClosed from error

    def take(self) -> tuple[Status, Leaves]:
        status = Status(int(self._run("token")))
        return status, self._run("unstage") if status == Status.BATCH else []

    def dequeue(self, ended: Callable[[int], None]) -> Leaves:
        with tf.control_dependencies([batch_or_end(self._tokens.dequeue(), ended)]):
            return shaped(self._unstage(), self._specs)

    def _unstage(self) -> Leaves:
        with tf.device(self._device):
            parts = tf.raw_ops.Unstage(dtypes=self._dtypes, **self._area)
        with tf.control_dependencies(parts), tf.device("CPU:0"):
            permit = self._permits.enqueue(PERMIT)
        with tf.control_dependencies([permit]), tf.device(self._device):
            return [tf.identity(part) for part in parts]
