"""Sending batches to another process or machine."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import zmq

from ..formats.errors import OperationError, UsageError
from .frame_peers import MAX_NAME
from .frame_socket import FrameSocket, Message
from .frames import Buffer, FrameDamaged, Head, Kind, pack_batch, pack_note, read_head
from .passes import Passes, Source, end

LOOK_AGAIN = 0.5  # seconds after which a waiting thread looks anew, lest a lost notice, or Ctrl-C, hang it
PATIENCE = 1.0  # seconds for the receiver to take note of an error
RETRY_MS = 100  # between attempts to reach a receiver
LINGER_MS = 500  # for an error that the receiver has not taken note of yet
MAX_NOTE = 1 << 20
MAX_TEXT = 4000  # characters of an error, so that a header holds them however they are escaped

_TOKEN = secrets.token_hex(4)


class ReceiverGone(OperationError):
    """The receiver was closed, or is gone, before it had acknowledged the end of the epoch."""


def send_batches(
    batches: Source,
    endpoint: str,
    *,
    bind: bool = False,
    name: str | None = None,
    timeout: float | None = None,
) -> int:
    """Send one epoch to a FrameReceiver; returns once that has taken everything and acknowledged the end.

    ``batches`` is a Loader, any iterable of what :func:`.frames.pack_batch` takes, or a function that returns one. It
    is begun when the receiver lets this sender in, for which ``timeout`` seconds are waited (None: for ever). The
    receiver decides how many batches may be on their way. Large arrays are not copied, and the next batch is
    asked for only when the one before has been sent and its memory is free again.

    A receiver counts each ``name`` once per epoch, so that a fast sender's next epoch is not taken for a slow
    one's first; threads of one process need a name each. With ``bind`` it waits for one receiver to connect.

    Returns how many batches were sent, which are fewer than all where the receiver left the epoch early. Raises
    ReceiverGone where it was closed or died, UsageError for a batch that cannot be sent or is larger than the
    receiver takes, and what ``batches`` raises, of which the receiver is told. Ctrl-C is heard.

    There is no authentication and no encryption: for loopback, or a network that is trusted.
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
            link.tell(error)
            raise
        link.finish(number)
        return number


def _name_of_process() -> str:
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{_TOKEN}"


class _Link:
    """The connection to a receiver, and what that has said on it."""

    def __init__(self, endpoint: str, *, bind: bool, name: str) -> None:
        options: dict[int, int] = {
            zmq.SNDHWM: 0,  # the receiver's credit is what bounds it
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: MAX_NOTE,
            zmq.RECONNECT_IVL: RETRY_MS,
            zmq.IMMEDIATE: 0,  # with 1, what a receiver said right before it closed would be lost
        }
        watched = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._socket = FrameSocket(zmq.DEALER, endpoint, bind=bind, options=options, watched=watched)
        self._endpoint = endpoint
        self._bind = bind
        self._name = name
        self._to_greet = self._has_greeted = False
        self._connection: int | None = None
        self._credit = 0
        self._limit = 0
        self._is_stopped = self._is_done = False

    def enter(self, timeout: float | None) -> None:
        """Greet whoever is there, until a receiver answers."""
        if not self._await(lambda: self._connection is not None, timeout):
            raise OperationError(
                f"{self._endpoint}: no receiver let this sender in within {timeout} s; is one iterating there?"
            )

    def send_batch(self, batch: Any, number: int) -> bool:
        """False where the receiver wants no more. The batch's memory is free again when this returns."""
        parts = pack_batch(batch, number)
        size = sum(len(part) for part in parts[1:])
        if size > self._limit:
            raise UsageError(
                f"a batch of {size:,} bytes is larger than the {self._limit:,} that the receiver takes; send "
                "smaller ones, or raise its limit_bytes"
            )
        self._await(lambda: self._credit > 0 or self._is_stopped)
        if self._is_stopped:
            return False
        self._credit -= 1
        self._send(parts)
        return True

    def finish(self, number: int) -> None:
        """Say that this was all, and wait until the receiver has taken it."""
        self._say(Kind.END, number)
        self._await(lambda: self._is_done or self._is_stopped)

    def tell(self, error: BaseException) -> None:
        """Tell the receiver, if it is there to listen."""
        text = "".join(traceback.format_exception(error))[-MAX_TEXT:]
        with suppress(OperationError):
            self._say(Kind.ERROR, text=text)
            self._await(lambda: self._is_done or self._is_stopped, PATIENCE)

    def _say(self, kind: Kind, number: int = 0, **notes: str | int) -> None:
        if not self._socket.send(pack_note(kind, number, **notes)):
            raise self._gone()

    def _send(self, parts: Sequence[Buffer]) -> None:
        try:
            tracker = self._socket.send_tracked(parts)
        except zmq.Again:
            raise self._gone() from None
        while True:
            try:
                return tracker.wait(LOOK_AGAIN)
            except zmq.NotDone:
                self._hear_all()

    def _await(self, heard: Callable[[], bool], timeout: float | None = None) -> bool:
        """Hear what the receiver says until that was heard; False where it was not in so many seconds."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self._hear_all()
            if heard():
                return True
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self._socket.wait(min(LOOK_AGAIN, remaining))

    def _hear_all(self) -> None:
        is_gone = self._note_events()
        if self._to_greet and self._socket.send(pack_note(Kind.HELLO, name=self._name)):
            self._to_greet, self._has_greeted = False, True
        while message := self._socket.receive():  # a receiver's last words come before its end
            with suppress(FrameDamaged):
                self._hear(message, read_head(message.parts[0]))
        if is_gone and not self._is_done and not self._is_stopped:
            raise self._gone()

    def _note_events(self) -> bool:
        """Whether the receiver has gone."""
        is_gone = False
        for event, connection in self._socket.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._to_greet = not self._has_greeted or (self._bind and self._connection is None)
            elif connection == self._connection if self._bind else self._has_greeted:
                is_gone = True
        return is_gone

    def _hear(self, message: Message, head: Head) -> None:
        if head.kind == Kind.WELCOME and self._connection is None:
            self._limit = _limit_in(head)
            self._connection = message.connection
            self._credit = head.number
        elif head.kind == Kind.CREDIT:
            self._credit += head.number
        elif head.kind == Kind.DONE:
            self._is_done = True
        elif head.kind == Kind.STOP:
            self._is_stopped = True

    def _gone(self) -> ReceiverGone:
        return ReceiverGone(
            f"{self._endpoint}: the receiver was closed, or is gone, before this epoch was at its end; what it had "
            "taken may be used, the rest is not there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger_ms=0 if self._is_done else LINGER_MS)


def _limit_in(head: Head) -> int:
    limit = head.description.get("limit")
    if type(limit) is not int:
        raise FrameDamaged("a receiver's welcome has no limit")
    return limit
