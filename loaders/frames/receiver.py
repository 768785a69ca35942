"""The receiver of batches from other processes or machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Self

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.sizes import byte_count
from shardprep.loaders.engine.protocol.worker_errors import reported

from .bounds import FrameDamaged
from .codec import (
    DEFAULT_LIMIT,
    FrameKind,
    Head,
    pack_note,
    read_head,
    unpack_batch,
)
from .exclusive_use import ExclusiveUse
from .frame_socket import (
    LINGER_MS,
    POLL_INTERVAL_S,
    SPARE_MESSAGES,
    FrameSocket,
    Message,
)
from .peers import Peer, Peers, Role


class SenderFailed(OperationError):
    """A sender reported an error, disconnected, or lost a batch before the end of its epoch."""


class FrameReceiver(Owned):
    """The batches that :func:`send_batches` sends to ``endpoint`` (``tcp://ADDRESS:PORT`` or ``ipc://PATH``).

    Each iteration is one epoch. It admits ``senders`` senders, each name once, and ends when each has sent
    its batches; further senders wait for the next epoch. The batches of one sender arrive in its order,
    exactly once. Where a sender reports an error, dies within its epoch or loses a batch, SenderFailed is
    raised; the next iteration admits senders again. Leaving an iteration early stops its senders.

    A batch is an array, a list of bytes, or a tuple or dict of these; arrays are aligned to 64 bytes. At most
    ``high_water_mark`` batches of a sender are in flight, each of at most ``limit_bytes`` (a number, or a
    text such as ``"256MiB"``). Frames that are damaged, or from a peer that was not admitted, are dropped and
    counted in ``rejected``.

    With ``bind``, the default, the receiver listens; port ``*`` chooses a free one, which is in the attribute
    ``endpoint``. Otherwise it connects to one sender that listens. There is no authentication and no
    encryption: any program that reaches the endpoint can send batches. Use loopback or a trusted network.

    A context manager. ``close()`` is idempotent, may be called from any thread, and a thread that waits for a
    batch then raises UsageError. One thread at a time may draw. Neither copyable nor picklable. Raises
    UsageError for arguments that are not valid, OperationError where the endpoint cannot be used.
    """

    instead = "an endpoint has one receiver: make it where it is needed"

    batches_never_change = True

    def __init__(
        self,
        endpoint: str,
        *,
        senders: int = 1,
        bind: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
        high_water_mark: int = 4,
    ) -> None:
        if senders < 1 or high_water_mark < 1 or (senders > 1 and not bind):
            raise UsageError(
                f"senders={senders}, high_water_mark={high_water_mark}, bind={bind}: at least 1 each, and with "
                "bind=False one sender"
            )
        limit = (
            int(byte_count(limit_bytes, of="limit_bytes")) if isinstance(limit_bytes, str) else limit_bytes
        )
        options: dict[int, int] = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.IMMEDIATE: 1,  # with 0, a sender that listened and disconnected would still count as reachable
            zmq.RCVHWM: high_water_mark + SPARE_MESSAGES,
            zmq.MAXMSGSIZE: max(limit, 1 << 17),
        }
        socket = FrameSocket(zmq.ROUTER, endpoint, bind=bind, options=options)
        self.endpoint = socket.endpoint
        self._reception = _Reception(socket, Peers(senders), limit, high_water_mark)
        Finalize(self, self._reception.close, exitpriority=20)

    @property
    def rejected(self) -> int:
        """The number of messages that were dropped."""
        return self._reception.rejected

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. Raises UsageError once this is closed, or another iteration has begun."""
        return self._epoch(self._reception.begin())

    def _epoch(self, epoch_number: int) -> Iterator[Any]:
        try:
            while batch := self._reception.next(epoch_number):
                yield batch.pop()
        finally:
            self._reception.leave(epoch_number)

    def close(self) -> None:
        """Wake a waiting thread, disconnect the senders and free the endpoint. Idempotent."""
        self._reception.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reception(Owned):
    """The socket and the senders of a FrameReceiver. The thread that draws has exclusive use."""

    def __init__(self, socket: FrameSocket, peers: Peers, limit: int, credit: int) -> None:
        self.rejected = 0
        self._socket = socket
        self._peers = peers
        self._limit = limit
        self._credit = credit
        self._epoch_number = 0
        self._is_running = False
        self._exclusive = ExclusiveUse("receiver", self._release)

    def begin(self) -> int:
        """Begin an epoch, and return its number."""
        with self._exclusive.use():
            self._leave()
            self._epoch_number += 1
            self._is_running = True
            self._admit_waiting()
            return self._epoch_number

    def next(self, epoch_number: int) -> list[Any]:
        """Return the next batch in a list, which is empty at the end of the epoch."""
        with self._exclusive.use():
            while True:
                self._exclusive.check_open()
                if epoch_number != self._epoch_number:
                    raise UsageError(
                        "another iteration of this receiver has begun; end the first, or use two receivers"
                    )
                if self._peers.all_done():
                    return []
                if (message := self._socket.receive()) is None:
                    self._wait()
                elif batch := self._handle(message):
                    return batch

    def leave(self, epoch_number: int) -> None:
        """Stop the senders of the epoch, if it is still the current one."""
        if epoch_number == self._epoch_number:
            with suppress(UsageError), self._exclusive.use():  # closed: there is nothing to leave
                self._leave()

    def close(self) -> None:
        self._exclusive.close()

    def _release(self) -> None:
        self._socket.close(linger_ms=LINGER_MS)

    def _leave(self) -> None:
        if self._is_running:
            self._is_running = False
            for peer in self._peers.end_epoch():
                self._send_note(peer, FrameKind.STOP)

    def _wait(self) -> None:
        if not self._socket.wait(POLL_INTERVAL_S, other=self._exclusive.woken):
            self._check_connected()

    def _check_connected(self) -> None:
        """Raise SenderFailed where a sender is disconnected. Called when all messages were read."""
        for peer in self._peers.sending():
            if self._send_note(peer, FrameKind.CREDIT, 0):
                continue
            if peer.received:
                raise SenderFailed(
                    f"sender {peer.name} disconnected after {peer.received} batches, before the end of its epoch; "
                    "iterate again, with a sender that sends its epoch from the beginning"
                )
            self._peers.forget(peer)
        self._admit_waiting()

    def _send_note(self, peer: Peer, kind: FrameKind, number: int = 0, **notes: str | int) -> bool:
        """Return False where the peer is disconnected."""
        return self._socket.send(pack_note(kind, number, **notes), peer=peer.address)

    def _admit_waiting(self) -> None:
        while peer := self._peers.admit_next():
            if not self._send_note(peer, FrameKind.WELCOME, self._credit, limit=self._limit):
                self._peers.forget(peer)

    def _handle(self, message: Message) -> list[Any]:
        """Handle a message. Return its batch in a list, which is empty where it has none."""
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            peer = self._peers.get(message.peer)
            if head.kind == FrameKind.HELLO:
                self._peers.add(message.peer, head)
                self._admit_waiting()
            elif peer is not None and peer.role is Role.SENDING:
                return self._handle_admitted(peer, head, message.parts[1:])
            elif not self._peers.was_dismissed(message.peer):
                raise FrameDamaged("a frame is from a peer that was not admitted")
        except FrameDamaged:
            self.rejected += 1
        return []

    def _handle_admitted(self, peer: Peer, head: Head, parts: list[zmq.Frame]) -> list[Any]:
        if head.kind == FrameKind.DATA:
            return self._receive_batch(peer, head, parts)
        if head.kind == FrameKind.END:
            self._check_number(peer, head)
        elif head.kind != FrameKind.ERROR:
            raise FrameDamaged("a frame from a sender is of a kind that only receivers send")
        peer.role = Role.DONE
        self._send_note(peer, FrameKind.DONE)
        if head.kind == FrameKind.ERROR:
            raise reported(SenderFailed, f"sender {peer.name} failed", str(head.description.get("text")))
        return []

    def _receive_batch(self, peer: Peer, head: Head, parts: list[zmq.Frame]) -> list[Any]:
        batch = [unpack_batch(head, parts, limit_bytes=self._limit)]
        if head.number < peer.received:
            raise FrameDamaged("a batch arrived twice")
        self._check_number(peer, head)
        peer.received += 1
        self._send_note(peer, FrameKind.CREDIT, 1)
        return batch

    def _check_number(self, peer: Peer, head: Head) -> None:
        if head.number != peer.received:
            raise SenderFailed(
                f"sender {peer.name} has sent {head.number} batches, of which {peer.received} arrived; "
                f"{self.rejected} messages were rejected"
            )
