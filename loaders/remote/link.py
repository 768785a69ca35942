"""A sender's connection to a receiver, from the greeting until one of them goes."""

from __future__ import annotations

import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq

from ...formats.errors import OperationError, UsageError
from ..frame_socket import FrameSocket
from ..frames import FrameDamaged, Head, Kind, pack_note, read_head
from .conversation import MAX_TEXT, Delivery, Hello, Welcome, Work, pack_delivery, read_lease, text_in
from .handshake import Handshake
from .ledger import Lease
from .security import SenderKeys

LOOK_AGAIN = 0.5  # seconds after which a waiting thread looks anew, lest a lost notice, or Ctrl-C, hang it
PATIENCE = 2.0  # seconds for the receiver to take note of an error
RETRY_MS, RETRY_MAX_MS = 100, 2000  # between attempts to reach a receiver
LINGER_MS = 500  # for the last words
MAX_NOTE = 1 << 17


class ReceiverAway(Exception):
    """The receiver cannot be reached at present."""


class Refused(UsageError):
    """The receiver does not want this sender's batches, for the reason that it gave."""


class Link:
    """Not thread-safe. Raises NotAdmitted and WrongReceiver where the handshake shows that it is hopeless."""

    def __init__(
        self,
        endpoint: str,
        keys: SenderKeys | None,
        hello: Hello,
        *,
        on_the_way: int,
        look: Callable[[int], None],
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._look = look  # called while it waits, with the number of steps still to send
        self._handshake = Handshake(endpoint, keys)
        options: dict[int, int] = {
            zmq.SNDHWM: 0,  # the leases are what bounds it
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: MAX_NOTE,
            zmq.RECONNECT_IVL: RETRY_MS,
            zmq.RECONNECT_IVL_MAX: RETRY_MAX_MS,
            zmq.IMMEDIATE: 0,  # with 1, what a receiver said right before it closed would be lost
        }
        self._socket = FrameSocket(
            zmq.DEALER,
            endpoint,
            bind=False,
            options=options,
            watched=Handshake.WATCHED,
            security=self._handshake,
        )
        self._welcome = Welcome(session=0, limit=0)
        self._is_welcome = self._is_greeted = self._is_gone = self._is_probed = False
        self._refusal = ""
        self.is_done = False
        self._leased: deque[Work] = deque()  # the steps that are asked for, all of one pass
        self._drawn: deque[Work] = deque()  # the steps that are being made
        self._last_lease = 0
        self._sending: deque[zmq.MessageTracker] = deque()
        self._most_sending = on_the_way

    def enter(self, patience: float) -> None:
        """Wait until a receiver lets this sender in, as long as there is a receiver.

        Raises ReceiverAway, OperationError where none was there for so many seconds, or Refused.
        """
        if not self._await(lambda: self._is_greeted, patience):
            raise OperationError(
                f"{self._endpoint}: no receiver was there for {patience:g} s; is the address right, and one running?"
            )
        self._await(lambda: self._is_welcome or self.is_done)

    def next_pass(self) -> int | None:
        """Wait for a lease; the pass that it is of, None where the receiver was closed for good."""
        self._drawn.clear()
        self._await(lambda: bool(self._leased) or self.is_done)
        return None if self.is_done else self._leased[0].pass_number

    def steps(self, pass_number: int) -> Iterator[int]:
        """The leased steps of this pass, as far as they are at hand."""
        while self._has_lease_of(pass_number):
            self._drawn.append(self._leased.popleft())
            yield self._drawn[-1].step
            self._hear_all()

    def wants(self, pass_number: int) -> bool:
        """Whether steps of this pass are still wanted. Raises ReceiverAway, Refused."""
        self._check()
        return not self.is_done and (not self._leased or self._leased[0].pass_number == pass_number)

    def send(self, made: Delivery) -> int:
        """The next drawn step's batch; how many bytes. Raises UsageError where it cannot be sent.

        Returns before everything is on the wire: the batch's memory is used until then.
        """
        parts = pack_delivery(self._drawn[0], made)
        size = sum(len(part) for part in parts[1:])
        if size > self._welcome.limit:
            raise UsageError(
                f"a batch of {size:,} bytes is larger than the {self._welcome.limit:,} that the receiver takes; "
                "send smaller ones, or raise its limit_bytes"
            )
        with suppress(zmq.Again):  # it is gone, which will be heard
            self._sending.append(self._socket.send_tracked(parts))
        self._drawn.popleft()
        del parts, made
        while len(self._sending) > self._most_sending:
            self._await_sent()
        return size

    def end(self, total: int) -> None:
        """The pass ends before the next drawn step."""
        work = self._drawn[0]._replace(step=total)
        self._socket.send(work.pack(Kind.END))
        if self._has_lease_of(work.pass_number):
            self._leased.clear()

    def tell(self, error: BaseException) -> None:
        """The next drawn step cannot be made; wait a little until the receiver knows."""
        text = "".join(traceback.format_exception(error))[-MAX_TEXT:]
        with suppress(ReceiverAway, OperationError, UsageError):
            if not self._drawn and self._leased:
                self._drawn.append(self._leased.popleft())
            if not self._drawn:
                self.leave()
                return
            self._socket.send(self._drawn[0].pack(Kind.ERROR, text=text))
            self._await(lambda: self.is_done, PATIENCE)

    def leave(self) -> None:
        """Say good-bye, so that what is leased to this sender is leased to others at once."""
        if not self.is_done:
            self._socket.send(pack_note(Kind.STOP))

    @property
    def lag(self) -> int:
        """How many leased steps have not been sent."""
        return len(self._drawn) + len(self._leased)

    def _has_lease_of(self, pass_number: int) -> bool:
        return bool(self._leased) and self._leased[0].pass_number == pass_number and not self._is_gone

    def _await_sent(self) -> None:
        while True:
            try:
                self._sending[0].wait(LOOK_AGAIN)
            except zmq.NotDone:
                self._hear_all()
                self._check()
            else:
                self._sending.popleft()
                return

    def _await(self, heard: Callable[[], bool], timeout: float = math.inf) -> bool:
        """Hear what the receiver says until that was heard; False where it was not in so many seconds."""
        until = time.monotonic() + timeout
        while True:
            self._hear_all()
            if heard():
                return True
            self._check()
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self._look(self.lag)
            self._socket.wait(min(LOOK_AGAIN, remaining))

    def _check(self) -> None:
        if self._refusal:
            raise Refused(f"{self._endpoint}: the receiver refuses this sender: {self._refusal}")
        if self._is_gone and not self.is_done:
            raise ReceiverAway

    def _hear_all(self) -> None:
        for event, value in self._socket.events():
            self._note(event, value)
        while message := self._socket.receive():  # a receiver's last words come before its end
            with suppress(FrameDamaged):
                self._hear(read_head(message.parts[0]))
        if self._is_probed and not self.lag:
            self._socket.send(pack_note(Kind.CREDIT, self._last_lease))
        self._is_probed = False

    def _note(self, event: int, value: int) -> None:
        if self._is_gone:
            return
        self._handshake.heard(event, value)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._is_greeted:
            self._is_greeted = self._socket.send(self._hello.pack())
        elif event == zmq.EVENT_DISCONNECTED:
            self._is_gone = self._is_greeted

    def _hear(self, head: Head) -> None:
        if head.kind == Kind.WELCOME:
            self._welcome, self._is_welcome = Welcome.read(head), True
        elif head.kind == Kind.LEASE:
            self._take(read_lease(head))
        elif head.kind == Kind.CREDIT:
            self._is_probed = True
        elif head.kind == Kind.DONE:
            self.is_done = True
        elif head.kind == Kind.STOP:
            self._refusal = text_in(head.description, "text")

    def _take(self, lease: Lease) -> None:
        """Those of its steps that are not at hand already, as they may be where this sender was given up meanwhile."""
        if self._leased and self._leased[-1].pass_number != lease.pass_number:
            self._leased.clear()
        at_hand = {(work.pass_number, work.step) for work in (*self._leased, *self._drawn)}
        for step in range(lease.start, lease.stop):
            if (lease.pass_number, step) not in at_hand:
                self._leased.append(Work(self._welcome.session, lease.id, lease.pass_number, step))
        self._last_lease = lease.id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger_ms=0 if self.is_done or self._is_gone else LINGER_MS)
