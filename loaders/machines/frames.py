"""The sender and the receiver of batches from other processes or machines, without leases."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Self

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.owned import Owned
from shardprep.loaders.batches.passes import Passes, Source, ending
from shardprep.loaders.engine.messages import reported
from shardprep.loaders.machines.codec import (
    DEFAULT_LIMIT,
    Buffer,
    FrameDamaged,
    FrameKind,
    Head,
    pack_batch,
    pack_note,
    read_head,
    unpack_batch,
)
from shardprep.loaders.machines.socket import (
    LINGER_MS,
    MAX_NAME,
    MAX_TEXT_CHARACTERS,
    POLL_INTERVAL_S,
    SPARE_MESSAGES,
    FrameSocket,
    Message,
    Receiver,
    Security,
    bytes_of_limit,
    endpoints_of,
)
from shardprep.loaders.machines.wire import number_in

MAX_PEERS = 1000
MAX_DISMISSED = 1000  # addresses of dismissed peers; their last batches may still arrive


class Role(Enum):
    """The state of a peer: it waits for an epoch, sends its batches, or has sent them all."""

    WAITING = 0
    SENDING = 1
    DONE = 2


@dataclass
class Peer:
    """A sender's connection: its address, and the number of batches that were received in order."""

    address: bytes
    name: str
    role: Role = Role.WAITING
    received: int = 0


class SenderFailed(OperationError):
    """A sender reported an error, disconnected, or lost a batch before the end of its epoch."""


class FrameReceiver(Receiver):
    """Iterable over the batches that :func:`send_batches` sends to ``endpoint``; each iteration is one epoch.

    It admits ``senders`` senders, each name once, and ends when each has sent its batches; further senders
    wait for the next epoch. The batches of one sender arrive in its order, exactly once. Where a sender
    reports an error, dies within its epoch or loses a batch, SenderFailed is raised; the next iteration
    admits senders again. Leaving an iteration early stops its senders.

    A batch is an array, a list of bytes, or a tuple or dict of these; arrays are aligned to 64 bytes. Frames
    that are damaged, or from a peer that was not admitted, are dropped and counted in ``rejected``. There is
    no authentication and no encryption: any program that reaches an endpoint can send batches. Use loopback
    or a trusted network.

    A context manager. ``close()`` is idempotent and may be called from any thread; a thread that waits for a
    batch then raises UsageError. One thread at a time may draw. Neither copyable nor picklable.

    Args:
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH``; port ``*`` chooses a free one, which is in the
            attribute ``endpoint``. Given a list, the receiver listens at all of them; they are in
            ``endpoints``.
        senders: Number of senders of an epoch.
        bind: Whether the receiver listens; False connects to one sender that listens.
        limit_bytes: Largest size of a batch, in bytes or as "256MiB".
        high_water_mark: Number of batches of a sender in flight.

    Raises:
        UsageError: An argument is not valid.
        OperationError: The endpoint cannot be used.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        senders: int = 1,
        bind: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
        high_water_mark: int = 4,
    ) -> None:
        endpoints = endpoints_of(endpoint)
        if senders < 1 or high_water_mark < 1 or (not bind and (senders > 1 or len(endpoints) > 1)):
            raise UsageError(
                f"senders={senders}, high_water_mark={high_water_mark}, bind={bind}: at least 1 each, and with "
                "bind=False one sender and one endpoint"
            )
        self._limit, self._credit = bytes_of_limit(limit_bytes), high_water_mark
        socket = FrameSocket(
            zmq.ROUTER,
            endpoints,
            bind=bind,
            options={zmq.MAXMSGSIZE: max(self._limit, 1 << 17)},
            most_bytes=self._limit,
            most_waiting=high_water_mark + SPARE_MESSAGES,
        )
        self._senders = senders
        self._peers: dict[bytes, Peer] = {}
        self._dismissed: deque[bytes] = deque(maxlen=MAX_DISMISSED)
        self._rejected = 0
        self._is_running = False
        super().__init__(
            socket,
            partial(socket.close, linger_ms=LINGER_MS),
            name="receiver",
            superseded="another iteration of this receiver has begun; end the first, or use two receivers",
        )

    @property
    def rejected(self) -> int:
        """The number of messages that were dropped."""
        return self._rejected + self._socket.dropped

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. Raises UsageError once this is closed, or another iteration has begun."""
        with self._exclusive.use():
            self._leave()
            self._iteration += 1
            self._is_running = True
            self._admit_waiting()
            return self._epoch(self._iteration)

    def _epoch(self, number: int) -> Iterator[Any]:
        try:
            yield from self._batches(number)
        finally:
            if number == self._iteration:
                with suppress(UsageError), self._exclusive.use():  # closed: there is nothing to leave
                    self._leave()

    def _leave(self) -> None:
        """Dismiss the senders of the epoch under way, and stop those that have not finished."""
        if self._is_running:
            self._is_running = False
            for peer in [peer for peer in self._peers.values() if peer.role is not Role.WAITING]:
                del self._peers[peer.address]
                self._dismissed.append(peer.address)
                if peer.role is Role.SENDING:
                    self._send_note(peer, FrameKind.STOP)

    def _is_at_end(self) -> bool:
        return sum(peer.role is Role.DONE for peer in self._peers.values()) == self._senders

    def _wait(self, woken: socket.socket) -> None:
        if not self._socket.wait(POLL_INTERVAL_S, other=woken):
            for peer in list(self._peers.values()):
                if peer.role is Role.SENDING and not self._send_note(peer, FrameKind.CREDIT):
                    del self._peers[peer.address]
                    self._check_lost(peer)
            self._admit_waiting()

    def _check_lost(self, peer: Peer) -> None:
        """Raise SenderFailed where a batch of a peer that is gone was taken in this epoch."""
        if peer.role is Role.SENDING and peer.received:
            raise SenderFailed(
                f"sender {peer.name} disconnected after {peer.received} batches, before the end of its epoch; "
                "iterate again, with a sender that sends its epoch from the beginning"
            )

    def _send_note(self, peer: Peer, kind: FrameKind, number: int = 0, **notes: int) -> bool:
        """Return False where the peer is disconnected."""
        return self._socket.send(pack_note(kind, number, **notes), peer=peer.address)

    def _admit_waiting(self) -> None:
        """Admit senders to the epoch as long as there is room, each name once."""
        for peer in list(self._peers.values()):
            names = {peer.name for peer in self._peers.values() if peer.role is not Role.WAITING}
            if peer.role is Role.WAITING and peer.name not in names and len(names) < self._senders:
                peer.role = Role.SENDING
                if not self._send_note(peer, FrameKind.WELCOME, self._credit, limit=self._limit):
                    del self._peers[peer.address]

    def _take(self) -> list[Any]:
        if self._is_at_end() or (message := self._socket.receive()) is None:
            return []
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            peer = self._peers.get(message.peer)
            if head.kind == FrameKind.HELLO:
                self._handle_hello(message.peer, head)
            elif peer is not None and peer.role is Role.SENDING:
                return self._handle_admitted(peer, head, message.parts[1:])
            elif message.peer not in self._dismissed:  # whose late frames are not counted as damaged
                raise FrameDamaged("a frame is from a peer that was not admitted")
        except FrameDamaged:
            self._rejected += 1
        return []

    def _handle_hello(self, address: bytes, head: Head) -> None:
        """Add a sender; a second HELLO changes nothing, unless it is of the next one at the same place."""
        before = None if self._socket.binds else self._peers.pop(address, None)
        name = head.description.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or len(self._peers) >= MAX_PEERS:
            raise FrameDamaged("a HELLO has no valid name, or there are too many senders")
        self._peers.setdefault(address, Peer(address, name))
        if before is not None:
            self._check_lost(before)
        self._admit_waiting()

    def _handle_admitted(self, peer: Peer, head: Head, parts: list[zmq.Frame]) -> list[Any]:
        batch = []
        if head.kind == FrameKind.DATA:
            batch.append(unpack_batch(head, parts, limit_bytes=self._limit))
            if head.number < peer.received:
                raise FrameDamaged("a batch arrived twice")
        elif head.kind not in (FrameKind.END, FrameKind.ERROR):
            raise FrameDamaged("a frame from a sender is of a kind that only receivers send")
        if head.kind != FrameKind.ERROR and head.number != peer.received:
            raise SenderFailed(
                f"sender {peer.name} has sent {head.number} batches, but {peer.received} arrived; "
                f"{self.rejected} messages were rejected"
            )
        if head.kind == FrameKind.DATA:
            peer.received += 1
            self._send_note(peer, FrameKind.CREDIT, 1)
        else:
            peer.role = Role.DONE
            self._send_note(peer, FrameKind.DONE)
        if head.kind == FrameKind.ERROR:
            raise reported(SenderFailed, f"sender {peer.name} failed", str(head.description.get("text")))
        return batch


RECONNECT_INTERVAL_MS = 100
MAX_NOTES = 20_000  # that a receiver sends while a batch is made: one each half second that it waits for it


class ReceiverLink(Owned, ABC):
    """The socket of a sender. It handles messages of the receiver while it waits. Not thread-safe.

    ``max_note_bytes`` bounds the buffers of these messages.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_note_bytes: int,
        watched: int = 0,
        bind: bool = False,
        max_reconnect_ms: int = 0,
        security: Security | None = None,
    ) -> None:
        self.is_done = self._is_lost = False
        self._endpoint = endpoint
        options: dict[int, int] = {
            zmq.SNDHWM: 0,  # the receiver's credit or leases bound it
            zmq.MAXMSGSIZE: max_note_bytes,
            zmq.RECONNECT_IVL: RECONNECT_INTERVAL_MS,
            zmq.RECONNECT_IVL_MAX: max_reconnect_ms,
        }
        self._socket = FrameSocket(
            zmq.DEALER,
            endpoint,
            bind=bind,
            options=options,
            most_bytes=max_note_bytes,
            watched=watched,
            security=security,
        )

    @abstractmethod
    def _receive_all(self) -> None:
        """Handle all events and messages that have arrived."""

    @abstractmethod
    def _handle(self, message: Message, head: Head) -> None:
        """Handle one message. Raises FrameDamaged where it is to be dropped."""

    def _check(self) -> None:
        """Raise where the receiver is lost."""

    def _on_wait(self) -> None:
        """Called before each wait for the receiver."""

    def _handle_messages(self) -> None:
        """Raises OperationError where the receiver's messages have no end."""
        for _ in range(MAX_NOTES):
            if (message := self._socket.receive()) is None:
                return
            with suppress(FrameDamaged):
                self._handle(message, read_head(message.parts[0]))
        raise OperationError(
            f"{self._endpoint}: the peer there sends more messages than a receiver would; is the address "
            "right?"
        )

    def _await(self, holds: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Handle messages until ``holds()``; return False after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while True:
            self._receive_all()
            if holds():
                return True
            self._check()
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self._on_wait()
            self._socket.wait(min(POLL_INTERVAL_S, remaining))

    def _await_sent(self, tracker: zmq.MessageTracker) -> None:
        """Handle messages until the memory of a message may be used again."""
        while True:
            try:
                return tracker.wait(POLL_INTERVAL_S)
            except zmq.NotDone:
                self._receive_all()
                self._check()

    def _checked_size(self, parts: Sequence[Buffer], limit: int) -> int:
        """Return the size of a batch in bytes. Raises UsageError where it is above the receiver's limit."""
        size = sum(len(part) for part in parts[1:])
        if size > limit:
            raise UsageError(
                f"a batch of {size:,} bytes is above the receiver's limit of {limit:,}; send smaller ones, or "
                "raise its limit_bytes"
            )
        return size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close(linger_ms=0 if self.is_done or self._is_lost else LINGER_MS)


def error_text(error: BaseException) -> str:
    """The end of the traceback, short enough for an ERROR frame."""
    return "".join(traceback.format_exception(error))[-MAX_TEXT_CHARACTERS:]


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
    """Send one epoch to the FrameReceiver at ``endpoint``.

    A batch is an array, a list of bytes, or a tuple or dict of these. The iteration begins when the receiver
    admits this sender, and the next batch is drawn when the last one is sent and its memory is free again.
    Large arrays are not copied. There is no authentication and no encryption: use it on loopback or on a
    trusted network. Ctrl-C ends it.

    Args:
        batches: A Loader, an iterable, or a function that returns one.
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH``.
        bind: Whether the sender listens and one receiver connects; by default the receiver listens.
        name: 1 to 256 characters; None is made of host and process. A receiver admits each name once per
            epoch, so threads of one process need different names.
        timeout: Seconds to wait for admission; None waits for ever.

    Returns:
        Number of batches that the receiver acknowledged: fewer than all where it left the epoch early.

    Raises:
        OperationError: No receiver admitted this sender within ``timeout``.
        ReceiverGone: The receiver was closed or died.
        UsageError: A batch cannot be sent or is above the receiver's limit. The receiver gets a report of
            this, and of what ``batches`` raises.
    """
    if name is not None and not 0 < len(name) <= MAX_NAME:
        raise UsageError(f"a sender's name has 1 to {MAX_NAME} characters, not {len(name)}")
    with _Link(endpoint, bind=bind, name=name or f"{process_name()}:{_TOKEN}") as link:
        return link.send_all(batches, math.inf if timeout is None else timeout)


def process_name() -> str:
    """The name of a sender that was given none."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}"


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
        self._is_stopped = False

    def send_all(self, batches: Source, timeout_s: float) -> int:
        """Send an epoch to a receiver that admits this sender; return the number of batches that it took."""
        if not self._await(lambda: self._connection is not None, timeout_s):
            raise OperationError(
                f"{self._endpoint}: no receiver admitted this sender within {timeout_s} s; is one iterating there?"
            )
        number = 0
        try:
            with ending(Passes(batches).begin()) as source:
                for batch in source:
                    if not self._send_batch(batch, number):
                        return number
                    number += 1
                    del batch
        except ReceiverGone:
            raise
        except BaseException as error:
            with suppress(OperationError):
                self._finish(FrameKind.ERROR, timeout_s=ERROR_REPORT_TIMEOUT_S, text=error_text(error))
            raise
        self._finish(FrameKind.END, number)
        return number

    def _send_batch(self, batch: Any, number: int) -> bool:
        """Send a batch, and wait until its memory is free. Return False where the receiver left the epoch."""
        parts = pack_batch(batch, number)
        self._checked_size(parts, self._limit)
        self._await(lambda: self._credit > 0 or self._is_stopped)
        if self._is_stopped:
            return False
        self._credit -= 1
        try:
            tracker = self._socket.send_tracked(parts)
        except zmq.Again:
            raise self._receiver_gone() from None
        self._await_sent(tracker)
        return True

    def _finish(self, kind: FrameKind, number: int = 0, *, timeout_s: float = math.inf, **notes: str) -> None:
        """Send END or ERROR, and wait for the acknowledgement."""
        if not self._socket.send(pack_note(kind, number, **notes)):
            raise self._receiver_gone()
        self._await(lambda: self.is_done or self._is_stopped, timeout_s)

    def _receive_all(self) -> None:
        """Handle the messages that have arrived. Raises ReceiverGone."""
        is_gone = False
        for event, connection in self._socket.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._must_send_hello = not self._has_sent_hello or (self._bind and self._connection is None)
            elif connection == self._connection if self._bind else self._has_sent_hello:
                is_gone = True
        if self._must_send_hello and self._socket.send(pack_note(FrameKind.HELLO, name=self._name)):
            self._must_send_hello, self._has_sent_hello = False, True
        self._handle_messages()  # also those that a receiver sent before it disconnected
        if is_gone and not self.is_done and not self._is_stopped:
            raise self._receiver_gone()

    def _handle(self, message: Message, head: Head) -> None:
        if self._connection is None:  # what comes before a WELCOME was meant for an earlier sender here
            if head.kind == FrameKind.WELCOME:
                self._limit = number_in(head.description, "limit")
                self._connection = message.connection
                self._credit = head.number
        elif head.kind == FrameKind.CREDIT:
            self._credit += head.number
        elif head.kind == FrameKind.DONE:
            self.is_done = True
        elif head.kind == FrameKind.STOP:
            self._is_stopped = True

    def _receiver_gone(self) -> ReceiverGone:
        return ReceiverGone(
            f"{self._endpoint}: the receiver was closed or disconnected before the end of this epoch; the "
            "batches that it had taken may be used, the rest is lost"
        )
