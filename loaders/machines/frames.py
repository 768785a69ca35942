"""Sender and receiver of batches between processes or machines, without leases."""

from __future__ import annotations

import logging
import math
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.batches.passes import Passes, Source
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
from shardprep.loaders.machines.ledger import StepRef
from shardprep.loaders.machines.link import Link, Make, OpenParts, process_name
from shardprep.loaders.machines.socket import (
    LINGER_MS,
    MAX_NAME,
    POLL_INTERVAL_S,
    SPARE_MESSAGES,
    FrameSocket,
    Message,
    Receiver,
    bytes_of_limit,
    endpoints_of,
)
from shardprep.loaders.machines.wire import UNKNOWN
from shardprep.loaders.order.epoch import LoadedStep

MAX_PEERS = 1000
MAX_DISMISSED = 1000  # dismissed peers whose last batches may still arrive
LONELY_POLLS = 10  # without all senders, before it is logged
TOKEN = secrets.token_hex(4)  # tells this process from earlier ones with its PID

log = logging.getLogger(__name__)


class Role(Enum):
    """Whether a peer waits for an epoch, sends its batches, or has sent them all."""

    WAITING = 0
    SENDING = 1
    DONE = 2


@dataclass
class Peer:
    """A connected sender, and the number of batches received from it."""

    address: bytes
    name: str
    role: Role = Role.WAITING
    received: int = 0


class SenderFailed(OperationError):
    """A sender reported an error, disconnected, or lost a batch before the end of its epoch."""


class FrameReceiver(Receiver):
    """Iterable over the batches that :func:`send_batches` sends to ``endpoint``; each iteration is one epoch.

    An epoch admits ``senders`` senders, each name once, and ends when each has sent its batches; further
    senders wait for the next epoch. The batches of one sender arrive in its order, exactly once. If a sender
    reports an error, dies during its epoch or loses a batch, SenderFailed is raised; the next iteration
    admits senders again. Leaving an iteration early stops its senders.

    A batch is an array, a list of bytes, or a tuple or dict of these; arrays are aligned to 64 bytes. Damaged
    frames, and frames from peers that were not admitted, are dropped and counted in ``rejected``. There is no
    authentication and no encryption: any program that reaches an endpoint can send batches. Use loopback or a
    trusted network.

    A context manager. ``close()`` is idempotent and may be called from any thread; a thread that waits for a
    batch then raises UsageError. One thread at a time may draw. Neither copyable nor picklable.

    Args:
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH``; port ``*`` chooses a free one, which is in the
            attribute ``endpoint``. Given a list, the receiver listens at all of them; they are in
            ``endpoints``.
        senders: Number of senders per epoch.
        bind: Whether the receiver listens; False connects to one sender that listens.
        limit_bytes: Maximum size of a batch, in bytes or as "256MiB".
        high_water_mark: Number of batches in flight per sender.

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
            endpoints,
            bind=bind,
            options={zmq.MAXMSGSIZE: max(self._limit, 1 << 17)},
            most_bytes=self._limit,
            most_waiting=high_water_mark + SPARE_MESSAGES,
        )
        self._senders = senders
        self._peers: dict[bytes, Peer] = {}
        self._lonely_polls = 0
        self._dismissed: deque[bytes] = deque(maxlen=MAX_DISMISSED)
        self._rejected = 0
        super().__init__(
            socket,
            partial(socket.close, linger_ms=LINGER_MS),
            name="receiver",
            superseded="another iteration of this receiver has begun; end the first, or use two receivers",
        )

    @property
    def rejected(self) -> int:
        """Number of dropped messages."""
        return self._rejected + self._socket.dropped

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. Raises UsageError once this is closed."""
        with self._exclusive.use():
            self._leave()
            self._iteration += 1
            self._admit_waiting()
            return self._epoch(self._iteration)

    def _epoch(self, number: int) -> Iterator[Any]:
        try:
            yield from self._batches(number)
        finally:
            if number == self._iteration:
                with suppress(UsageError), self._exclusive.use():  # closed: nothing to leave
                    self._leave()

    def _leave(self) -> None:
        """Dismiss the senders of the current epoch, and stop those that have not finished."""
        for peer in [peer for peer in self._peers.values() if peer.role is not Role.WAITING]:
            del self._peers[peer.address]
            self._dismissed.append(peer.address)
            if peer.role is Role.SENDING:
                self._send_note(peer, FrameKind.STOP)

    def _wait(self, woken: socket.socket) -> None:
        deque(self._socket.events(), maxlen=0)  # unused: a sender is gone when it cannot be sent to
        if not self._socket.wait(POLL_INTERVAL_S, other=woken):
            for peer in list(self._peers.values()):
                if peer.role is Role.SENDING and not self._send_note(peer, FrameKind.CREDIT):
                    del self._peers[peer.address]
                    self._check_lost(peer)
            self._admit_waiting()
            joined = sum(peer.role is not Role.WAITING for peer in self._peers.values())
            self._lonely_polls += joined < self._senders
            if joined < self._senders and self._lonely_polls == LONELY_POLLS:
                said = "%s: %d of %d senders have joined this epoch (each name counts once); waiting for more"
                log.warning(said, self._socket.endpoint, joined, self._senders)

    def _check_lost(self, peer: Peer) -> None:
        """Raise SenderFailed if a disconnected peer has contributed to this epoch."""
        if peer.role is Role.SENDING and peer.received:
            raise SenderFailed(
                f"sender {peer.name} disconnected after {peer.received} batches, before the end of its epoch; "
                "iterate again, with a sender that sends its epoch from the beginning"
            )

    def _send_note(self, peer: Peer, kind: FrameKind, number: int = 0, **notes: int) -> bool:
        """Send a frame to a peer; return False if it is disconnected."""
        return self._socket.send(pack_note(kind, number, **notes), peer=peer.address)

    def _admit_waiting(self) -> None:
        """Admit waiting senders to the epoch while there is room, each name once."""
        for peer in list(self._peers.values()):
            names = {peer.name for peer in self._peers.values() if peer.role is not Role.WAITING}
            if peer.role is Role.WAITING and peer.name not in names and len(names) < self._senders:
                peer.role = Role.SENDING
                if not self._send_note(peer, FrameKind.WELCOME, self._credit, limit=self._limit):
                    del self._peers[peer.address]

    def _take(self) -> list[Any] | None:
        if self._is_at_end():
            return []
        if (message := self._socket.receive()) is None:
            return None
        return self._handle(message) or ([] if self._is_at_end() else None)

    def _is_at_end(self) -> bool:
        return sum(peer.role is Role.DONE for peer in self._peers.values()) == self._senders

    def _handle(self, message: Message) -> list[Any] | None:
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            peer = self._peers.get(message.peer)
            if head.kind == FrameKind.HELLO:
                self._handle_hello(message.peer, head)
            elif peer is not None and peer.role is Role.SENDING:
                return self._handle_admitted(peer, head, message.parts[1:])
            elif message.peer not in self._dismissed:  # their late frames are not damaged
                raise FrameDamaged("a frame is from a peer that was not admitted")
        except FrameDamaged:
            self._rejected += 1
        return None

    def _handle_hello(self, address: bytes, head: Head) -> None:
        """Add a sender. A second HELLO has no effect, unless a new sender has replaced the connected one."""
        before = None if self._socket.binds else self._peers.pop(address, None)
        name = head.description.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or len(self._peers) >= MAX_PEERS:
            raise FrameDamaged("a HELLO has no valid name, or there are too many senders")
        self._peers.setdefault(address, Peer(address, name))
        if before is not None:
            self._check_lost(before)
        self._admit_waiting()

    def _handle_admitted(self, peer: Peer, head: Head, parts: list[zmq.Frame]) -> list[Any] | None:
        batch = None
        if head.kind == FrameKind.DATA:
            batch = [unpack_batch(head, parts, limit_bytes=self._limit)]
            if head.number < peer.received:
                raise FrameDamaged("a batch arrived twice")
        elif head.kind not in (FrameKind.END, FrameKind.ERROR):
            raise FrameDamaged("a sender sent a kind of frame that only receivers send")
        if head.kind != FrameKind.ERROR and head.number != peer.received:
            raise SenderFailed(
                f"sender {peer.name} has sent {head.number} batches, but {peer.received} arrived; "
                f"{self.rejected} messages were rejected"
            )
        if batch is not None:
            peer.received += 1
            self._send_note(peer, FrameKind.CREDIT, 1)
            return batch
        peer.role = Role.DONE
        self._send_note(peer, FrameKind.DONE)
        if head.kind == FrameKind.ERROR:
            raise reported(SenderFailed, f"sender {peer.name} failed", str(head.description.get("text")))
        return None


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
    admits this sender. A batch is drawn when the receiver has room for it and the memory of the batch before
    is free again. Large arrays are not copied. There is no authentication and no encryption: use it on
    loopback or on a trusted network. Ctrl-C ends it.

    Args:
        batches: A Loader, an iterable, or a function that returns one.
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH``.
        bind: Whether the sender listens and one receiver connects; by default the receiver listens.
        name: 1 to 256 characters; by default made from host and process. A receiver admits each name once
            per epoch, so threads of one process need different names.
        timeout: Seconds to wait for admission; None waits forever.

    Returns:
        Number of batches that the receiver acknowledged: fewer than all if it left the epoch early.

    Raises:
        OperationError: No receiver admitted this sender within ``timeout``.
        ReceiverGone: The receiver was closed or died.
        UsageError: A batch cannot be sent or exceeds the receiver's limit. This, and any error of
            ``batches``, is also reported to the receiver.
    """
    if name is not None and not 0 < len(name) <= MAX_NAME:
        raise UsageError(f"a sender's name has 1 to {MAX_NAME} characters, not {len(name)}")
    source = Passes(batches)
    with (
        closing(OpenParts(lambda pass_number, part: source.begin())) as parts,
        EpochLink(endpoint, parts.items, bind=bind, name=name or f"{process_name()}:{TOKEN}") as link,
    ):
        if not link.wait_for(lambda: link.is_admitted, math.inf if timeout is None else timeout):
            raise OperationError(
                f"{endpoint}: no receiver admitted this sender within {timeout} s; is one iterating there?"
            )
        try:
            link.make_leased_steps()
        except (KeyboardInterrupt, SystemExit) as error:
            link.report(error)
            raise
        return link.batches


class EpochLink(Link):
    """The connection to a FrameReceiver for one epoch. Each credit leases the next batches."""

    def __init__(self, endpoint: str, make: Make, *, bind: bool, name: str) -> None:
        super().__init__(endpoint, pack_note(FrameKind.HELLO, name=name), make, bind=bind)
        self._credited = 0  # batches

    def _handle(self, message: Message, head: Head) -> None:
        if not self.is_admitted:  # frames before the WELCOME were meant for an earlier sender here
            if head.kind == FrameKind.WELCOME:
                self._admit(message, head)
                self._add_credit(head.number)
        elif head.kind == FrameKind.CREDIT:
            self._add_credit(head.number)
        elif head.kind in (FrameKind.DONE, FrameKind.STOP):
            self.is_done = True

    def _add_credit(self, batches: int) -> None:
        first = self._credited
        if self._total == UNKNOWN:
            self._credited += min(batches, self._most - len(self._leased))
            self._leased.extend(StepRef(0, 0, 0, step) for step in range(first, self._credited))

    def _end(self, total: int) -> None:
        super()._end(total)
        self._total = total  # ignores further credit

    def _data_frame(self, step: StepRef, made: LoadedStep) -> list[Buffer]:
        return pack_batch(made.batch, step.step)

    def _end_frame(self, step: StepRef) -> list[Buffer]:
        return pack_note(FrameKind.END, step.step)

    def _error_frame(self, text: str) -> list[Buffer]:
        return pack_note(FrameKind.ERROR, text=text)
