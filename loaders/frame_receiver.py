"""Batches that arrive from other processes or machines, epoch after epoch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from socket import socketpair
from types import TracebackType
from typing import Any, Self

import zmq

from ..formats.errors import OperationError, UsageError
from .frame_peers import Peer, Peers, Role
from .frame_socket import FrameSocket, Message
from .frames import DEFAULT_LIMIT, FrameDamaged, Head, Kind, pack_note, read_head, unpack_batch
from .sizes import byte_count

LOOK_AGAIN = 0.5  # seconds after which a waiting thread looks anew, lest a lost notice, or Ctrl-C, hang it
PATIENCE = 5.0  # seconds that close() gives the thread that is drawing to let go
LINGER_MS = 500  # for the last words to senders
SPARE_MESSAGES = 16  # beside batches, that a sender has in flight: so its connection is always read


class SenderFailed(OperationError):
    """A sender reported an error, or is gone, or lost a batch before its epoch was over."""


class FrameReceiver:
    """The batches that ``senders`` senders send to ``endpoint`` (``tcp://ADDRESS:PORT``, ``ipc://PATH``).

    Each iteration is one epoch: it lets in so many senders, each name once, and is over when each has said so;
    who comes more than that waits for the next epoch. Senders' batches come in each one's order, exactly once.
    Where one reports an error, dies in the middle of its epoch or loses a batch, SenderFailed is raised; the
    next iteration then begins anew with whoever is there. Leaving an iteration sends its senders away.

    Batches are arrays that start on 64 bytes, tuples and dicts of them, and lists of bytes. A sender has at most
    ``high_water_mark`` batches on their way, each of at most ``limit_bytes`` (or ``"256MiB"``). Frames that
    are damaged, or come from who was not let in, are dropped and counted in ``rejected``.

    There is no authentication and no encryption: who reaches the endpoint can send batches, so it belongs on
    loopback or on a network that is trusted. Port ``*`` chooses a free one, which ``endpoint`` tells. With
    ``bind=False`` it connects to one sender that binds. A context manager; ``close()`` is safe twice and from any
    thread, and wakes who waits with UsageError. One thread at a time may draw. Not picklable.
    """

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
                f"senders={senders}, high_water_mark={high_water_mark}, bind={bind}: at least 1 each, and who "
                "does not bind has one sender"
            )
        limit = (
            int(byte_count(limit_bytes, of="limit_bytes")) if isinstance(limit_bytes, str) else limit_bytes
        )
        options: dict[int, int] = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.IMMEDIATE: 1,  # or who is gone from an endpoint that this connected to could still be reached
            zmq.RCVHWM: high_water_mark + SPARE_MESSAGES,
            zmq.MAXMSGSIZE: max(limit, 1 << 17),
        }
        socket = FrameSocket(zmq.ROUTER, endpoint, bind=bind, options=options)
        self.endpoint = socket.endpoint
        self._reception = _Reception(socket, Peers(senders), limit, high_water_mark)
        Finalize(self, self._reception.close, exitpriority=20)

    @property
    def rejected(self) -> int:
        """How many messages were dropped."""
        return self._reception.rejected

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. Raises UsageError once this is closed, or another iteration was begun."""
        return self._epoch(self._reception.begin())

    def _epoch(self, ticket: int) -> Iterator[Any]:
        try:
            while batch := self._reception.next(ticket):
                yield batch.pop()
        finally:
            self._reception.leave(ticket)

    def close(self) -> None:
        """Wake who waits, and free the endpoint, which the senders see. Idempotent."""
        self._reception.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reception:
    """What the finalizer closes. Who draws holds the lock; whoever comes last, he or who closes, lets all go."""

    def __init__(self, socket: FrameSocket, peers: Peers, limit: int, credit: int) -> None:
        self.rejected = 0
        self._socket = socket
        self._peers = peers
        self._limit = limit
        self._credit = credit
        self._ticket = 0
        self._under_way = False
        self._closed = False
        self._using = threading.Lock()
        self._user: int | None = None
        self._released = threading.Event()
        self._woken, self._waker = socketpair()

    def begin(self) -> int:
        with self._turn():
            self._leave()
            self._ticket += 1
            self._under_way = True
            self._let_in()
            return self._ticket

    def next(self, ticket: int) -> list[Any]:
        """The next batch in a list, which is empty at the end of the epoch."""
        with self._turn():
            while True:
                self._check_open()
                if ticket != self._ticket:
                    raise UsageError(
                        "another iteration of this receiver has begun; end the first, or use two receivers"
                    )
                if self._peers.all_done():
                    return []
                if (message := self._socket.receive()) is None:
                    self._wait()
                elif batch := self._heard(message):
                    return batch

    def leave(self, ticket: int) -> None:
        if ticket == self._ticket and not self._closed:
            with suppress(UsageError), self._turn():
                self._leave()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):  # closed already
            self._waker.send(b"x")
        self._release()
        if self._user != threading.get_ident():
            self._released.wait(PATIENCE)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._check_open()
        if not self._using.acquire(blocking=False):
            self._check_open()
            raise UsageError("another thread draws from this receiver; use one receiver for each")
        self._user = threading.get_ident()
        try:
            self._check_open()
            yield
        finally:
            self._user = None
            self._using.release()
            if self._closed:
                self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this receiver is closed; make a new one")

    def _release(self) -> None:
        if self._using.acquire(blocking=False):  # and for ever
            self._socket.close(linger_ms=LINGER_MS)
            self._woken.close()
            self._waker.close()
            self._released.set()

    def _leave(self) -> None:
        if self._under_way:
            self._under_way = False
            for peer in self._peers.end_epoch():
                self._say(peer, Kind.STOP)

    def _wait(self) -> None:
        if not self._socket.wait(LOOK_AGAIN, other=self._woken):
            self._check_present()

    def _check_present(self) -> None:
        """Once all that had come was read: who cannot be reached has nothing more to say."""
        for peer in self._peers.sending():
            if self._say(peer, Kind.CREDIT, 0):
                continue
            if peer.received:
                raise SenderFailed(
                    f"sender {peer.name} is gone after {peer.received} batches, in the middle of its epoch; "
                    "iterate again with a sender that starts anew"
                )
            self._peers.forget(peer)
        self._let_in()

    def _say(self, peer: Peer, kind: Kind, number: int = 0, **notes: str | int) -> bool:
        """False where it is gone."""
        return self._socket.send(pack_note(kind, number, **notes), peer=peer.address)

    def _let_in(self) -> None:
        while peer := self._peers.let_in():
            if not self._say(peer, Kind.WELCOME, self._credit, limit=self._limit):
                self._peers.forget(peer)

    def _heard(self, message: Message) -> list[Any]:
        """A batch in a list, or an empty one."""
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            peer = self._peers.get(message.peer)
            if head.kind == Kind.HELLO:
                self._peers.add(message.peer, head)
                self._let_in()
            elif peer is not None and peer.role is Role.SENDING:
                return self._said(peer, head, message.parts[1:])
            elif not self._peers.was_sent_away(message.peer):
                raise FrameDamaged("a frame comes from nobody that was let in")
        except FrameDamaged:
            self.rejected += 1
        return []

    def _said(self, peer: Peer, head: Head, parts: list[zmq.Frame]) -> list[Any]:
        if head.kind == Kind.DATA:
            return self._batch(peer, head, parts)
        if head.kind == Kind.END:
            self._check_number(peer, head)
        elif head.kind != Kind.ERROR:
            raise FrameDamaged("a sender says what only a receiver says")
        peer.role = Role.DONE
        self._say(peer, Kind.DONE)
        if head.kind == Kind.ERROR:
            raise SenderFailed(f"sender {peer.name} failed:\n{head.description.get('text')}")
        return []

    def _batch(self, peer: Peer, head: Head, parts: list[zmq.Frame]) -> list[Any]:
        batch = [unpack_batch(head, parts, limit_bytes=self._limit)]
        if head.number < peer.received:
            raise FrameDamaged("a batch came twice")
        self._check_number(peer, head)
        peer.received += 1
        self._say(peer, Kind.CREDIT, 1)
        return batch

    def _check_number(self, peer: Peer, head: Head) -> None:
        if head.number != peer.received:
            raise SenderFailed(
                f"sender {peer.name} has sent {head.number} batches, of which {peer.received} arrived; "
                f"{self.rejected} messages were rejected"
            )
