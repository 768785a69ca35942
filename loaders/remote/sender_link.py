"""A sender's connection to a RemoteSource, from HELLO until one of them disconnects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.frames.codec import FrameKind, Head, pack_note
from shardprep.loaders.frames.frame_socket import LINGER_MS, Message
from shardprep.loaders.frames.receiver_link import ReceiverLink, error_text
from shardprep.loaders.remote.auth.keys import SenderKeys
from shardprep.loaders.remote.auth.sender_auth import SenderAuth
from shardprep.loaders.remote.leasing.ledger import StepLease

from .messages import (
    Delivery,
    Hello,
    StepRef,
    Welcome,
    pack_delivery,
    read_lease,
    text_in,
)

ERROR_REPORT_TIMEOUT_S = 2.0  # for which the sender waits until the receiver has acknowledged an error
MAX_RECONNECT_MS = 2000  # between attempts to connect, after several that failed
MAX_NOTE_BYTES = 1 << 17


class ReceiverAway(Exception):
    """The connection to the receiver is lost; a new one may succeed."""


class Refused(UsageError):
    """The receiver refuses this sender's batches; the message has its reason."""


class Link(ReceiverLink):
    """The connection to a RemoteSource. Not thread-safe.

    At most ``max_in_flight`` batches are being sent when :meth:`send` returns. ``on_wait`` is called before
    each wait, with the number of steps still to send. Methods that wait raise NotAdmitted and WrongReceiver
    where the handshake fails for good.
    """

    def __init__(
        self,
        endpoint: str,
        keys: SenderKeys | None,
        hello: Hello,
        *,
        max_in_flight: int,
        on_wait: Callable[[int], None],
    ) -> None:
        self._hello = hello
        self._report_lag = on_wait
        self._auth = SenderAuth(endpoint, keys)
        super().__init__(
            endpoint,
            watched=SenderAuth.WATCHED,
            max_note_bytes=MAX_NOTE_BYTES,
            max_reconnect_ms=MAX_RECONNECT_MS,
            security=self._auth,
        )
        self._welcome = Welcome(session=0, limit=0)
        self._is_admitted = self._has_sent_hello = self._is_lost = self._is_probed = False
        self._refusal = ""
        self.is_done = False
        self._leased: deque[StepRef] = deque()  # the leased steps, all of one pass
        self._drawn: deque[StepRef] = deque()  # the steps that are being made
        self._last_lease = 0
        self._sending: deque[zmq.MessageTracker] = deque()
        self._max_in_flight = max_in_flight

    def enter(self, timeout_s: float) -> None:
        """Connect within ``timeout_s``, and wait until the receiver admits this sender.

        Raises OperationError where there was no receiver, ReceiverAway where it disconnected, or Refused.
        """
        if not self._await(lambda: self._has_sent_hello, timeout_s):
            raise OperationError(
                f"{self._endpoint}: no receiver was there for {timeout_s:g} s; is the address right, and one running?"
            )
        self._await(lambda: self._is_admitted or self.is_done)

    def next_pass(self) -> int | None:
        """Wait for a lease, and return the number of its pass, None where the receiver was closed."""
        self._drawn.clear()
        self._await(lambda: bool(self._leased) or self.is_done)
        return None if self.is_done else self._leased[0].pass_number

    def steps(self, pass_number: int) -> Iterator[int]:
        """Yield the steps of this pass that are leased at present."""
        while self._has_lease_of(pass_number):
            self._drawn.append(self._leased.popleft())
            yield self._drawn[-1].step
            self._receive_all()

    def wants(self, pass_number: int) -> bool:
        """Return whether steps of this pass are still wanted. Raises ReceiverAway, Refused."""
        self._check()
        return not self.is_done and (not self._leased or self._leased[0].pass_number == pass_number)

    def send(self, made: Delivery) -> int:
        """Send the batch of the next drawn step, and return its size in bytes. Raises UsageError.

        Returns before everything is sent: until then the batch's memory is in use.
        """
        parts = pack_delivery(self._drawn[0], made)
        size = sum(len(part) for part in parts[1:])
        if size > self._welcome.limit:
            raise UsageError(
                f"a batch of {size:,} bytes is above the receiver's limit of {self._welcome.limit:,}; send smaller "
                "ones, or raise its limit_bytes"
            )
        with suppress(zmq.Again):  # disconnected; the event follows
            self._sending.append(self._socket.send_tracked(parts))
        self._drawn.popleft()
        del parts, made
        while len(self._sending) > self._max_in_flight:
            self._await_sent(self._sending[0])
            self._sending.popleft()
        return size

    def end(self, total: int) -> None:
        """Report that the pass, or the part of step ``total``, ends before that step."""
        work = self._drawn[0]._replace(step=total)
        self._socket.send(work.pack(FrameKind.END))
        if self._has_lease_of(work.pass_number):
            parts = self._hello.terms.parts
            self._leased = deque(held for held in self._leased if (held.step - total) % parts)

    def report_error(self, error: BaseException) -> None:
        """Report that the next drawn step cannot be made. Waits shortly for the acknowledgement."""
        with suppress(ReceiverAway, OperationError, UsageError):
            if not self._drawn and self._leased:
                self._drawn.append(self._leased.popleft())
            if not self._drawn:
                self.leave()
                return
            self._socket.send(self._drawn[0].pack(FrameKind.ERROR, text=error_text(error)))
            self._await(lambda: self.is_done, ERROR_REPORT_TIMEOUT_S)

    def leave(self) -> None:
        """Send STOP: the steps that are leased to this sender are leased to others at once."""
        if not self.is_done:
            self._socket.send(pack_note(FrameKind.STOP))

    @property
    def lag(self) -> int:
        """The number of leased steps that have not been sent."""
        return len(self._drawn) + len(self._leased)

    def _has_lease_of(self, pass_number: int) -> bool:
        return bool(self._leased) and self._leased[0].pass_number == pass_number and not self._is_lost

    def _on_wait(self) -> None:
        self._report_lag(self.lag)

    def _check(self) -> None:
        """Raise Refused or ReceiverAway."""
        if self._refusal:
            raise Refused(f"{self._endpoint}: the receiver refuses this sender: {self._refusal}")
        if self._is_lost and not self.is_done:
            raise ReceiverAway

    def _receive_all(self) -> None:
        for event, value in self._socket.events():
            self._note_event(event, value)
        self._handle_messages()  # also those that a receiver sent before it disconnected
        if self._is_probed and not self.lag:
            self._socket.send(pack_note(FrameKind.CREDIT, self._last_lease))
        self._is_probed = False

    def _note_event(self, event: int, value: int) -> None:
        if self._is_lost:
            return
        self._auth.note_event(event, value)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._has_sent_hello:
            self._has_sent_hello = self._socket.send(self._hello.pack())
        elif event == zmq.EVENT_DISCONNECTED:
            self._is_lost = self._has_sent_hello

    def _handle(self, message: Message, head: Head) -> None:
        if head.kind == FrameKind.WELCOME:
            self._welcome, self._is_admitted = Welcome.read(head), True
        elif head.kind == FrameKind.LEASE:
            self._add_lease(read_lease(head))
        elif head.kind == FrameKind.CREDIT:
            self._is_probed = True
        elif head.kind == FrameKind.DONE:
            self.is_done = True
        elif head.kind == FrameKind.STOP:
            self._refusal = text_in(head.description, "text")

    def _add_lease(self, lease: StepLease) -> None:
        """Add the steps that this sender does not hold yet, as it does where an earlier lease expired."""
        if self._leased and self._leased[-1].pass_number != lease.pass_number:
            self._leased.clear()
        held = {(work.pass_number, work.step) for work in (*self._leased, *self._drawn)}
        for step in range(lease.start, lease.stop):
            if (lease.pass_number, step) not in held:
                self._leased.append(StepRef(self._welcome.session, lease.id, lease.pass_number, step))
        self._last_lease = lease.id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger_ms=0 if self.is_done or self._is_lost else LINGER_MS)
