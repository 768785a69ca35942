"""A sender's connection, which makes and sends the steps that a receiver requests."""

from __future__ import annotations

import math
import os
import socket
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any

import numpy as np
import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.owners import Closable
from shardprep.loaders.batches.passes import end_pass
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.codec import FrameDamaged, FrameKind, Head, pack_batch, pack_note, read_head
from shardprep.loaders.machines.keys import NotAdmitted, SenderAuth, WrongReceiver
from shardprep.loaders.machines.ledger import StepRef
from shardprep.loaders.machines.socket import (
    LINGER_MS,
    MAX_TEXT_CHARACTERS,
    POLL_INTERVAL_S,
    FrameSocket,
    Message,
)
from shardprep.loaders.order.epoch import LoadedStep

HELLO_INTERVAL_S = 30.0  # until the receiver, which may have lost the HELLO, admits the sender
RECONNECT_INTERVAL_MS = 100
MAX_RECONNECT_MS = 2000  # for a sender that waits for its receiver to restart
MAX_NOTE_BYTES = 1 << 20
ERROR_REPORT_TIMEOUT_S = 2.0  # the longest wait for the receiver to acknowledge an error


def process_name() -> str:
    """Return the default name of a sender."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}"


@dataclass(frozen=True)
class PassEnd:
    """Reports that the pass, or the part that has step ``total``, ends before that step."""

    total: int


PASSED_OVER = None  # an item before the requested step: the sender handles messages, then draws the next one

Outcome = LoadedStep | PassEnd | None
Make = Callable[[int, Iterable[int]], Iterator[Outcome]]
"""Yields the batches of the given steps of a pass, in order; closing the iterator ends the work.

It may draw steps ahead. It yields PASSED_OVER for each item that is made only to reach a later one, and
PassEnd last if the pass has no such step.
"""


@dataclass(frozen=True)
class ServedSource:
    """A source that can make any step of any pass. Equal ``terms`` mean equal batches.

    The next batch is made while at most ``max_in_flight`` are being sent. ``close`` ends work that outlives
    the iterators of ``make``; the source itself stays open.
    """

    terms: wire.SourceTerms
    max_in_flight: int
    make: Make
    close: Callable[[], None] = lambda: None


def wrap_item(item: Any, step: int) -> LoadedStep:
    """Wrap an item as a step whose only record has the number of the step."""
    return LoadedStep(step, item, np.array([step], np.int64))


class OpenParts:
    """The parts of a pass, opened by ``begin(pass, part)``; item i of part p is step i * parts + p."""

    def __init__(self, begin: Callable[[int, int], Iterator[Any]], parts: int = 1) -> None:
        self._begin = begin
        self._count = parts
        self._pass_number = -1
        self._parts: dict[int, Iterator[Any]] = {}
        self._drawn: Counter[int] = Counter()  # items of each open part

    def items(self, pass_number: int, steps: Iterable[int]) -> Iterator[Outcome]:
        """Yield the items of these steps, as a :data:`Make` does."""
        if pass_number != self._pass_number:
            self.close()
            self._pass_number = pass_number
        for step in steps:
            number, part = divmod(step, self._count)
            if number < self._drawn[part]:  # too far: begin again
                end_pass(self._parts.pop(part))
                self._drawn[part] = 0
            if part not in self._parts:
                self._parts[part] = self._begin(pass_number, part)
            while drawn := list(islice(self._parts[part], 1)):
                self._drawn[part] += 1
                if self._drawn[part] > number:
                    break
                yield PASSED_OVER
            if not drawn:
                yield PassEnd(self._drawn[part] * self._count + part)
                return
            yield wrap_item(drawn.pop(), step)

    def close(self) -> None:
        while self._parts:
            end_pass(self._parts.popitem()[1])
        self._drawn.clear()


class ReceiverGone(OperationError):
    """The receiver was closed or disconnected before it acknowledged the end of the epoch."""


class Refused(UsageError):
    """The receiver refuses this sender; the message has its reason."""


LINK_ERRORS = (ReceiverGone, Refused, NotAdmitted, WrongReceiver)  # the link, not the source

WAITING = "waiting for the receiver"


@dataclass(eq=False, repr=False)
class Link(Closable):
    """One connection to a receiver, and the steps leased over it. Not thread-safe.

    ``on_change`` is called after each batch, and before each wait for the receiver. With ``bind`` the sender
    listens, and one receiver connects; ``once`` means one pass, of plain batches.
    """

    endpoint: str
    hello: wire.Hello
    source: ServedSource
    _: KW_ONLY
    bind: bool = False
    once: bool = False
    auth: SenderAuth | None = None
    on_change: Callable[[Link], None] = lambda link: None

    def __post_init__(self) -> None:
        self.state = WAITING
        self.batches = self.bytes = 0  # sent
        self.is_admitted = self.has_sent_hello = self.is_done = False
        self._is_lost = self._is_probed = False
        self._hello_due = math.inf
        self._packed_hello = self.hello.pack()
        self._total = self.source.terms.steps
        self._refusal = ""
        self._connection = -1  # the one that the WELCOME came over
        self._session = self._limit = self._last_lease = 0  # the limit is in bytes per batch
        self._leased: deque[StepRef] = deque()  # not yet drawn, all of one pass
        self._drawn: deque[StepRef] = deque()  # being made
        self._sending: deque[zmq.MessageTracker] = deque()
        self._socket = FrameSocket(
            self.endpoint,
            bind=self.bind,
            peers=False,
            options={
                zmq.SNDHWM: 0,  # the receiver's leases bound the queue
                zmq.MAXMSGSIZE: MAX_NOTE_BYTES,
                zmq.RECONNECT_IVL: RECONNECT_INTERVAL_MS,
                zmq.RECONNECT_IVL_MAX: 0 if self.once else MAX_RECONNECT_MS,
            },
            secure=self.auth.secure if self.auth else None,
        )

    @property
    def lag(self) -> int:
        """Number of leased steps that have not been sent."""
        return len(self._drawn) + len(self._leased)

    def make_leased_steps(self) -> None:
        """Make leased steps until the receiver is done. Raises ReceiverGone, Refused, and source errors."""
        self.wait_for(lambda: self.is_admitted or self.is_done)
        while not self.is_done:
            self.state = "standing by"
            self._drawn.clear()
            self.wait_for(lambda: bool(self._leased) or self.is_done)
            if self.is_done:
                return
            self.state = "sending"
            number = self._leased[0].pass_number
            with closing(self.source.make(number, self._draw(number))) as batches:  # type: ignore[type-var]
                while self._wants_pass(number) and self._send_next(batches):
                    pass

    def _draw(self, pass_number: int) -> Iterator[int]:
        """Yield the steps of this pass as long as some are leased."""
        while self._leased and self._leased[0].pass_number == pass_number and not self._is_lost:
            self._drawn.append(self._leased.popleft())
            yield self._drawn[-1].step
            self._receive_all()

    def _wants_pass(self, pass_number: int) -> bool:
        """Return whether the receiver still wants steps of this pass. Raises ReceiverGone, Refused."""
        self._receive_all()
        self._check_link()
        return not self.is_done and (not self._leased or self._leased[0].pass_number == pass_number)

    def _send_next(self, batches: Iterator[Outcome]) -> bool:
        """Make an item, and send it if it was requested; return whether there was one. Reports errors."""
        try:
            for outcome in islice(batches, 1):
                if isinstance(outcome, PassEnd):
                    self._send_end(outcome.total)
                    return False
                if outcome is not PASSED_OVER:
                    self._send(outcome)
                return True
        except Exception as error:
            if not isinstance(error, LINK_ERRORS):
                self.report(error)
            raise
        return False

    def _send(self, step: LoadedStep) -> None:
        """Send the batch of the next drawn step. Its memory may be in use afterwards. Raises UsageError."""
        ref = self._drawn[0]
        parts = pack_batch(step.batch, ref.step) if self.once else wire.pack_delivery(ref, step)
        size = sum(len(part) for part in parts[1 if self.once else 1 + wire.BATCH_AT :])
        if size > self._limit:
            raise UsageError(
                f"a batch of {size:,} bytes is above the receiver's limit of {self._limit:,}; send smaller ones, or "
                "raise its limit_bytes"
            )
        with suppress(zmq.Again):  # disconnected; the event follows
            self._sending.append(self._socket.send_tracked(parts))
        self._drawn.popleft()
        del parts, step
        while len(self._sending) > self.source.max_in_flight:
            try:
                self._sending[0].wait(POLL_INTERVAL_S)
                self._sending.popleft()
            except zmq.NotDone:
                self._receive_all()
                self._check_link()
        self.batches, self.bytes = self.batches + 1, self.bytes + size
        self.on_change(self)

    def _send_end(self, total: int) -> None:
        """Report that the pass, or the part that contains step ``total``, ends before that step."""
        ref = self._drawn[0]._replace(step=total)
        self._socket.send(wire.pack_step(FrameKind.END, ref))
        if self.once:
            self._total = total  # the receiver may have sent more leases
        if self._leased and self._leased[0].pass_number == ref.pass_number:
            self._leased = deque(ref for ref in self._leased if (ref.step - total) % self.source.terms.parts)

    def report(self, error: BaseException) -> None:
        """Report that the next step cannot be made, and wait briefly for the acknowledgement."""
        text = "".join(traceback.format_exception(error))[-MAX_TEXT_CHARACTERS:]
        if not self.lag:
            self.leave(text)
            return
        with suppress(*LINK_ERRORS, OperationError):
            self._socket.send(wire.pack_step(FrameKind.ERROR, [*self._drawn, *self._leased][0], text=text))
            self.wait_for(lambda: self.is_done, ERROR_REPORT_TIMEOUT_S)

    def leave(self, reason: str = "") -> None:
        """Send STOP, so that the receiver leases this sender's steps to others at once."""
        if not self.is_done:
            self._socket.send(pack_note(FrameKind.STOP, text=reason))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Handle messages until ``condition()``; return False after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while True:
            self._receive_all()
            if condition():
                return True
            self._check_link()
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self.on_change(self)
            self._socket.wait(min(POLL_INTERVAL_S, remaining))

    def _check_link(self) -> None:
        if self._refusal:
            raise Refused(f"{self.endpoint}: the receiver refuses this sender: {self._refusal}")
        if self._is_lost and not self.is_done:
            raise ReceiverGone(
                f"{self.endpoint}: the receiver was closed or disconnected before the end of this epoch; it may use "
                "the batches that it has taken, the rest are lost"
            )

    def _receive_all(self) -> None:
        for event, value in self._socket.events():
            if self._is_lost:
                continue
            if self.auth:
                self.auth.note_event(event)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hello_due = 0.0
                self._send_hello()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and not self._socket.binds:
                self._is_lost = self.has_sent_hello  # damage: the connection is read no more
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_lost = value == self._connection if self._socket.binds else self.has_sent_hello
        self._send_hello()  # again: a socket that binds may not have been ready
        while (message := self._socket.receive()) is not None:  # also of a receiver that has disconnected
            with suppress(FrameDamaged):
                self._handle(message, read_head(message.parts[0]))
        if self._is_probed and not self.lag:
            self._socket.send(pack_note(FrameKind.CREDIT, self._last_lease))
        self._is_probed = False

    def _send_hello(self) -> None:
        is_due = time.monotonic() >= self._hello_due and not self.is_admitted
        if is_due and self._socket.send(self._packed_hello):
            self.has_sent_hello = True
            self._hello_due = math.inf if self._socket.binds else time.monotonic() + HELLO_INTERVAL_S

    def _handle(self, message: Message, head: Head) -> None:
        """Handle one message. Raises FrameDamaged if it is not valid."""
        if head.kind == FrameKind.WELCOME:
            self._session, self._limit = (wire.read_number(head.description, n) for n in ("session", "limit"))
            self.is_admitted, self._connection = True, message.connection
        elif self._socket.binds and not self.is_admitted:
            return  # a message to an earlier sender here
        elif head.kind == FrameKind.LEASE:
            lease = wire.read_lease(head)
            if self._total != wire.UNKNOWN and lease.stop > self._total:
                raise FrameDamaged(f"a lease ends at step {lease.stop} of {self._total}")
            if self._leased and self._leased[-1].pass_number != lease.pass_number:
                self._leased.clear()
            # some may be known already, because an earlier lease of them expired
            known = {(ref.pass_number, ref.step) for ref in (*self._leased, *self._drawn)}
            for step in range(lease.start, lease.stop):
                if (lease.pass_number, step) not in known:
                    self._leased.append(StepRef(self._session, lease.id, lease.pass_number, step))
            self._last_lease = lease.id
        elif head.kind == FrameKind.CREDIT:
            self._is_probed = True
        elif head.kind == FrameKind.DONE:
            self.is_done = True
        elif head.kind == FrameKind.STOP:
            self._refusal = wire.read_text(head.description, "text")

    def close(self) -> None:
        self._socket.close(linger_ms=0 if self.is_done or self._is_lost else LINGER_MS)
