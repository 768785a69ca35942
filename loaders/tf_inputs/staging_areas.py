"""TensorFlow's staging areas, one on each device, and a queue of tokens before each.

Nothing wakes who waits in ``Unstage``, hence nobody does: a token says that the element is there, and
waiting for a token ends when its queue is closed.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .framework import tf
from .gate import gate, shaped, weak
from .replica_ends import ReplicaEnds
from .sink import Leaves, SinkClosed, Status
from .tensors import blanks

PATIENCE = 1.0  # seconds for who is staging to notice that there is room

_numbers = itertools.count(1)


class StagingAreas:
    """A sink that puts its element's parts on ``devices``, one each, ``depth`` elements deep.

    The leaves of an element are one list per device. What is staged was copied to the device, if it was not
    there already.
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
        self._emptied = 0  # how often
        self._pass = 1
        self._is_over = False  # the pass whose elements were put last
        with tf.device("CPU:0"):  # room for the end of a pass, too
            self._tokens = [tf.queue.FIFOQueue(depth + 1, [tf.int64]) for _ in devices]

    def put(self, status: Status, leaves: Leaves) -> None:
        if self._is_over:
            self.empty()  # a step that failed may have left something
        with self._changed:  # not in the middle of it
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
            if not self._hand_out(tokens, token, emptied):
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
                    self._unstage(device)  # nobody gets a token for it
                else:
                    self._clear()  # it may have come in after the sweep
                raise SinkClosed

    def _hand_out(self, tokens: Any, token: int, emptied: int) -> bool:
        """Say that an element is there, unless it was swept away meanwhile."""
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
        """The next part of this replica within a graph; ``ended`` is what its gate calls."""
        found = partial(weak(self._found), ended)
        with tf.device("CPU:0"):
            is_batch = gate(self._tokens[replica].dequeue(), found)
        device = self._devices[replica]
        parts = tf.cond(is_batch, lambda: self._unstage(device), lambda: blanks(self._specs))
        return shaped(parts, self._specs)

    def _found(self, ended: Callable[[int], None], token: int) -> None:
        self._ends.found(token, lambda: ended(_status(token)))

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        with tf.init_scope():
            self._end_tokens()

    def _end_tokens(self) -> None:
        for device, tokens in zip(self._devices, self._tokens, strict=True):
            tokens.close(cancel_pending_enqueues=True)
            self._let_go(device, tokens)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._staging, PATIENCE):
                self._clear()  # a step that failed left what it had a token for

    def _let_go(self, device: str, tokens: Any) -> None:
        """Take out what there are tokens for: a step that has one of its own will find its element."""
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
    """0 for a batch; the end of a pass has its number, and is the same for all devices."""
    return 0 if status == Status.BATCH else number * len(Status) + status


def _status(token: int) -> Status:
    return Status(token % len(Status))
