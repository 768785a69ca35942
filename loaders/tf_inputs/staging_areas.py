"""TensorFlow's staging areas, one on each device, and a queue of tokens before each.

Nothing wakes who waits in ``Unstage``, hence nobody does: a token says that the element is there, and
waiting for a token ends when its queue is closed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from .framework import tf
from .gate import gate, shaped
from .sink import Leaves, SinkClosed, Status

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
        self._closed = False
        with tf.device("CPU:0"):  # room for the end of a pass, too
            self._tokens = [tf.queue.FIFOQueue(depth + 1, [tf.uint8]) for _ in devices]

    def put(self, status: Status, leaves: Leaves) -> None:
        parts = leaves if status == Status.BATCH else [None] * len(self._devices)
        for device, part, tokens in zip(self._devices, parts, self._tokens, strict=True):
            if part is not None:
                self._stage(device, part)
            try:
                tokens.enqueue(tf.constant(status, tf.uint8))
            except tf.errors.OpError as error:
                raise SinkClosed from error

    def _stage(self, device: str, part: Leaves) -> None:
        with tf.device(device):
            values = [tf.identity(value) for value in part]
            tf.raw_ops.Stage(values=values, capacity=self.capacity, shared_name=self._name)
            if self._closed:  # clearing is what woke us
                self._clear()
                raise SinkClosed

    def level(self) -> int:
        return int(self._tokens[-1].size())

    def take(self) -> tuple[Status, list[Any]]:
        statuses = [int(tokens.dequeue()) for tokens in self._tokens]
        if statuses[0] != Status.BATCH:
            return Status(statuses[0]), []
        return Status.BATCH, [self._unstage(device) for device in self._devices]

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
        with tf.device("CPU:0"):
            status = self._tokens[replica].dequeue()
        with tf.control_dependencies([gate(status, ended)]):
            return shaped(self._unstage(self._devices[replica]), self._specs)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for tokens in self._tokens:
                tokens.close(cancel_pending_enqueues=True)
            self._clear()

    def _clear(self) -> None:
        for device in self._devices:
            with tf.device(device):
                tf.raw_ops.StageClear(
                    dtypes=[spec.dtype for spec in self._specs],
                    shared_name=self._name,
                    capacity=self.capacity,
                )
