"""TensorFlow's staging areas, one on each device, each with a queue of tokens.

A wait in ``Unstage`` cannot be interrupted. So a step waits for a token, which is put after its element; that
wait ends when the queue is closed.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shardprep.formats.system.owned import Owned
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import Leaves
from shardprep.loaders.tf_inputs.tensors.tensors import empty_tensors

from .closing import lock_for_closing
from .end_of_epoch import batch_or_end, shaped, weak
from .sink import SinkClosed, Status

REPLICAS_TIMEOUT_S = 1.0  # the first replica's longest wait for the others, which may have no thread


STAGING_TIMEOUT_S = 1.0  # the longest wait for a thread in ``Stage``, after a place was freed


class ReplicaEnds:
    """Has one replica report the end of each pass, after all replicas have taken it.

    The report is an exception, which aborts the step of all replicas. An end that a replica has not taken by
    then would stay for the next pass. Thread-safe.
    """

    def __init__(self, all_taken: Callable[[], bool]) -> None:
        self._all_taken = all_taken
        self._lock = threading.Lock()
        self._number = 0  # of the pass that ended last

    def found(self, number: int, report: Callable[[], None]) -> None:
        """Record that a replica took the end of this pass; for the first, call ``report``, which raises."""
        with self._lock:
            is_first, self._number = number != self._number, number
        if not is_first:
            return
        deadline = time.monotonic() + REPLICAS_TIMEOUT_S
        while not self._all_taken() and time.monotonic() < deadline:
            time.sleep(0.0005)
        report()


_numbers = itertools.count(1)


class StagingAreas(Owned):
    """A sink that puts one part of each element on each device; ``depth`` is its capacity in elements.

    The leaves of an element are one list per device. Parts are copied to their device unless they are there.
    """

    def __init__(self, specs: Sequence[Any], devices: Sequence[str], depth: int) -> None:
        self.capacity = depth
        self._specs = specs
        self._devices = devices
        self._name = f"shardprep-stage-{os.getpid()}-{next(_numbers)}"
        self._ends = ReplicaEnds(self._all_taken)
        self._changed = threading.Condition()
        self._closed = False
        self._staging = False
        self._putting = False
        self._emptied = 0  # how often the areas were emptied
        self._pass = 1
        self._is_over = False  # whether the element that was put last was the end of a pass
        with tf.device("CPU:0"):  # one more place, for the end of a pass
            self._tokens = [tf.queue.FIFOQueue(depth + 1, [tf.int64]) for _ in devices]

    def put(self, status: Status, leaves: Leaves) -> None:
        if self._is_over:
            self.empty()  # a step that failed may have left elements
        with self._changed:  # not while another thread empties
            emptied = self._emptied
        parts = leaves if status == Status.BATCH else [None] * len(self._devices)
        token = _token(status, self._pass)
        self._is_over = status != Status.BATCH
        self._pass += self._is_over
        self._putting = True
        try:
            self._put_all(parts, token, emptied)
        finally:
            self._putting = False

    def _put_all(self, parts: Sequence[Any], token: int, emptied: int) -> None:
        for device, part, tokens in zip(self._devices, parts, self._tokens, strict=True):
            if part is not None:
                self._stage(device, part, emptied)
            if not self._put_token(tokens, token, emptied):
                self._clear()
                return

    def _stage(self, device: str, part: Leaves, emptied: int) -> None:
        self._staging = True
        with tf.device(device):
            values = [tf.identity(value) for value in part]
            tf.raw_ops.Stage(values=values, capacity=self.capacity, shared_name=self._name)
        with self._changed:
            self._staging = False
            self._changed.notify_all()
            if self._closed:
                if self._emptied == emptied:
                    self._unstage(device)  # no step gets a token for it
                else:
                    self._clear()  # the part may have been staged after the areas were cleared
                raise SinkClosed

    def _put_token(self, tokens: Any, token: int, emptied: int) -> bool:
        """Put the token of an element, unless the areas were emptied since. Returns whether it was put."""
        with self._changed:
            try:
                if self._emptied == emptied:
                    tokens.enqueue(tf.constant(token, tf.int64))
            except tf.errors.OpError as error:
                raise SinkClosed from error
            return self._emptied == emptied

    def level(self) -> int:
        with tf.init_scope():  # a garbage collection may call this while a graph is being built
            return int(self._tokens[-1].size())

    def _all_taken(self) -> bool:
        return not self._putting and not any(int(tokens.size()) for tokens in self._tokens)

    def take(self) -> tuple[Status, list[Any]]:
        with tf.init_scope():
            status, *_ = [_status(int(tokens.dequeue())) for tokens in self._tokens]
            if status != Status.BATCH:
                return status, []
            return Status.BATCH, [self._unstage(device) for device in self._devices]

    def empty(self) -> None:
        with self._changed, tf.init_scope():
            self._emptied += 1
            for tokens in self._tokens:
                while int(tokens.size()):
                    tokens.dequeue()
            self._clear()

    def _unstage(self, device: str | None) -> Leaves:
        with tf.device(device):
            return list(
                tf.raw_ops.Unstage(
                    dtypes=[spec.dtype for spec in self._specs],
                    capacity=self.capacity,
                    shared_name=self._name,
                )
            )

    def dequeue(self, replica: int, ended: Callable[[int], None]) -> Leaves:
        """The replica's next part within a graph, which calls ``ended`` for an element that is no batch."""
        found = partial(weak(self._found), ended)
        with tf.device("CPU:0"):
            is_batch = batch_or_end(self._tokens[replica].dequeue(), found)
        device = self._devices[replica]
        parts = tf.cond(is_batch, lambda: self._unstage(device), lambda: empty_tensors(self._specs))
        return shaped(parts, self._specs)

    def _found(self, ended: Callable[[int], None], token: int) -> None:
        self._ends.found(token, lambda: ended(_status(token)))

    def close(self) -> None:
        """Drop all elements and wake waiting threads. Idempotent; a garbage collection may call it."""
        with lock_for_closing(self._changed):
            if self._closed:
                return
            self._closed = True
        with tf.init_scope():
            self._end_tokens()

    def _end_tokens(self) -> None:
        for device, tokens in zip(self._devices, self._tokens, strict=True):
            tokens.close(cancel_pending_enqueues=True)
            self._drop_elements(device, tokens)
        with lock_for_closing(self._changed) as is_held:
            if not (is_held and self._changed.wait_for(lambda: not self._staging, STAGING_TIMEOUT_S)):
                self._clear()  # a step that failed may have left the part for its token

    def _drop_elements(self, device: str, tokens: Any) -> None:
        """Take out the parts that have a token in the queue; a step that has a token finds its part."""
        try:
            while int(tokens.size()):
                if _status(int(tokens.dequeue())) == Status.BATCH:
                    self._unstage(device)
        except tf.errors.OutOfRangeError:  # a step took the last
            return

    def _clear(self) -> None:
        for device in self._devices:
            with tf.device(device):
                tf.raw_ops.StageClear(
                    dtypes=[spec.dtype for spec in self._specs],
                    shared_name=self._name,
                    capacity=self.capacity,
                )


def _token(status: Status, number: int) -> int:
    """Return the token: 0 for a batch, else a number for the status and the pass, equal for all devices."""
    return 0 if status == Status.BATCH else number * len(Status) + status


def _status(token: int) -> Status:
    return Status(token % len(Status))
