"""The sender of batches to another process or machine."""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.batching.passes import Passes, Source, end

from .bounds import FrameDamaged
from .codec import Buffer, FrameKind, Head, pack_batch, pack_note
from .frame_socket import LINGER_MS, Message
from .peers import MAX_NAME
from .receiver_link import ReceiverLink, error_text

ERROR_REPORT_TIMEOUT_S = 1.0  # for which the sender waits until the receiver has acknowledged an error
MAX_NOTE_BYTES = 1 << 20

_TOKEN = secrets.token_hex(4)


class ReceiverGone(OperationError):
    """The receiver was closed or disconnected before it acknowledged the end of the epoch."""


def send_batches(
    batches: Source,
    endpoint: str,
    *,
    bind: bool = False,
    name: str | None = None,
    timeout: float | None = None,
) -> int:
    """Send one epoch to the FrameReceiver at ``endpoint`` (``tcp://ADDRESS:PORT`` or ``ipc://PATH``).

    ``batches`` is a Loader, an iterable, or a function that returns one. A batch is an array, a list of
    bytes, or a tuple or dict of these. The iteration begins when the receiver admits this sender, and the
    next batch is drawn when the last one is sent and its memory is free again. Large arrays are not copied.

    With ``bind`` the sender listens and one receiver connects; by default the receiver listens. ``name`` has
    1 to 256 characters; None means a name made of host and process. A receiver admits each name once per
    epoch, so threads of one process need different names. ``timeout`` is in seconds: how long to wait for
    admission; None waits for ever.

    Returns the number of batches sent once the receiver has acknowledged them: fewer than all where the
    receiver left the epoch early. Raises OperationError after ``timeout``, ReceiverGone where the receiver
    was closed or died, UsageError for a batch that cannot be sent or is above the receiver's limit, and what
    ``batches`` raises; the receiver gets a report of the last two. Ctrl-C ends it.

    There is no authentication and no encryption: use it on loopback or on a trusted network.
    """
    if name is not None and not 0 < len(name) <= MAX_NAME:
        raise UsageError(f"a sender's name has 1 to {MAX_NAME} characters, not {len(name)}")
    with _Link(endpoint, bind=bind, name=name or _name_of_process()) as link:
        link.enter(timeout)
        number = 0
        try:
            source = Passes(batches).begin()
            try:
                for batch in source:
                    if not link.send_batch(batch, number):
                        return number
                    number += 1
                    del batch
            finally:
                end(source)
        except ReceiverGone:
            raise
        except BaseException as error:
            link.report_error(error)
            raise
        link.finish(number)
        return number


def _name_of_process() -> str:
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{_TOKEN}"


class _Link(ReceiverLink):
    """The connection to a FrameReceiver for one epoch."""

    def __init__(self, endpoint: str, *, bind: bool, name: str) -> None:
        watched = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        super().__init__(endpoint, watched=watched, max_note_bytes=MAX_NOTE_BYTES, bind=bind)
        self._bind = bind
        self._name = name
        self._must_send_hello = self._has_sent_hello = False
        self._connection: int | None = None
        self._credit = 0
        self._limit = 0
        self._is_stopped = self._is_done = False

    def enter(self, timeout: float | None) -> None:
        """Wait until a receiver admits this sender. Raises OperationError after ``timeout`` seconds."""
        if not self._await(lambda: self._connection is not None, math.inf if timeout is None else timeout):
            raise OperationError(
                f"{self._endpoint}: no receiver admitted this sender within {timeout} s; is one iterating there?"
            )

    def send_batch(self, batch: Any, number: int) -> bool:
        """Send a batch, and wait until its memory is free. Return False where the receiver left the epoch."""
        parts = pack_batch(batch, number)
        size = sum(len(part) for part in parts[1:])
        if size > self._limit:
            raise UsageError(
                f"a batch of {size:,} bytes is above the receiver's limit of {self._limit:,}; send smaller ones, or "
                "raise its limit_bytes"
            )
        self._await(lambda: self._credit > 0 or self._is_stopped)
        if self._is_stopped:
            return False
        self._credit -= 1
        self._send(parts)
        return True

    def finish(self, number: int) -> None:
        """Send END, and wait for the acknowledgement."""
        self._send_note(FrameKind.END, number)
        self._await(lambda: self._is_done or self._is_stopped)

    def report_error(self, error: BaseException) -> None:
        """Send the error to the receiver, if it is still connected."""
        with suppress(OperationError):
            self._send_note(FrameKind.ERROR, text=error_text(error))
            self._await(lambda: self._is_done or self._is_stopped, ERROR_REPORT_TIMEOUT_S)

    def _send_note(self, kind: FrameKind, number: int = 0, **notes: str | int) -> None:
        if not self._socket.send(pack_note(kind, number, **notes)):
            raise self._receiver_gone()

    def _send(self, parts: Sequence[Buffer]) -> None:
        try:
            tracker = self._socket.send_tracked(parts)
        except zmq.Again:
            raise self._receiver_gone() from None
        self._await_sent(tracker)

    def _receive_all(self) -> None:
        """Handle what has arrived. Raises ReceiverGone."""
        is_gone = self._note_events()
        if self._must_send_hello and self._socket.send(pack_note(FrameKind.HELLO, name=self._name)):
            self._must_send_hello, self._has_sent_hello = False, True
        self._handle_messages()  # also those that a receiver sent before it disconnected
        if is_gone and not self._is_done and not self._is_stopped:
            raise self._receiver_gone()

    def _note_events(self) -> bool:
        """Return whether the receiver has disconnected."""
        is_gone = False
        for event, connection in self._socket.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._must_send_hello = not self._has_sent_hello or (self._bind and self._connection is None)
            elif connection == self._connection if self._bind else self._has_sent_hello:
                is_gone = True
        return is_gone

    def _handle(self, message: Message, head: Head) -> None:
        if head.kind == FrameKind.WELCOME and self._connection is None:
            self._limit = _limit_in(head)
            self._connection = message.connection
            self._credit = head.number
        elif head.kind == FrameKind.CREDIT:
            self._credit += head.number
        elif head.kind == FrameKind.DONE:
            self._is_done = True
        elif head.kind == FrameKind.STOP:
            self._is_stopped = True

    def _receiver_gone(self) -> ReceiverGone:
        return ReceiverGone(
            f"{self._endpoint}: the receiver was closed or disconnected before the end of this epoch; the "
            "batches that it had taken may be used, the rest is lost"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger_ms=0 if self._is_done else LINGER_MS)


def _limit_in(head: Head) -> int:
    limit = head.description.get("limit")
    if type(limit) is not int:
        raise FrameDamaged("a WELCOME has no limit")
    return limit
