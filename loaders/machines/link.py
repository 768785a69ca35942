"""The connection of a sender: it makes and sends the steps that a receiver asks for."""

from __future__ import annotations

import math
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np
import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.owned import Owned
from shardprep.loaders.batches.passes import end
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.codec import Buffer, FrameDamaged, FrameKind, Head, pack_note, read_head
from shardprep.loaders.machines.keys import ConnectionDamaged, NotAdmitted, SenderAuth, WrongReceiver
from shardprep.loaders.machines.ledger import StepLease, StepRef
from shardprep.loaders.machines.socket import (
    LINGER_MS,
    MAX_TEXT_CHARACTERS,
    POLL_INTERVAL_S,
    FrameSocket,
    Message,
)
from shardprep.loaders.order.epoch import LoadedStep

RECONNECT_INTERVAL_MS = 100
MAX_NOTES = 20_000  # that a receiver sends while a batch is made: one each half second that it waits for it
MAX_NOTE_BYTES = 1 << 20
ERROR_REPORT_TIMEOUT_S = 2.0  # for which the sender waits until the receiver has acknowledged an error


def process_name() -> str:
    """The name of a sender that was given none."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}"


def error_text(error: BaseException) -> str:
    """The end of the traceback, short enough for an ERROR frame."""
    return "".join(traceback.format_exception(error))[-MAX_TEXT_CHARACTERS:]


@dataclass(frozen=True)
class PassEnd:
    """The pass has no more than ``total`` steps."""

    total: int


PASSED_OVER = None  # an item before the step that is asked for: the sender looks for messages, and draws on

Made = LoadedStep | PassEnd | None
Make = Callable[[int, Iterable[int]], Iterator[Made]]
"""A function of a pass and its steps that yields their batches; closing the iterator ends the work.

They come in the order of the steps, which may be drawn some steps ahead. PASSED_OVER stands for each item
that is made only to reach a later one, and PassEnd is the last where the pass has no such step.
"""


def made_of(item: Any, step: int) -> LoadedStep:
    """Return an item as a step that is its only record."""
    return LoadedStep(step, item, np.array([step], np.int64))


@dataclass
class OpenPart:
    """The items of a part from item ``due`` on."""

    items: Iterator[Any]
    due: int = 0


class OpenParts:
    """The parts of a pass, which ``begin(pass, part)`` begins and which stay open during it; often one.

    Item i of part p is step i * parts + p.
    """

    def __init__(self, begin: Callable[[int, int], Iterator[Any]], parts: int = 1) -> None:
        self._begin = begin
        self._count = parts
        self._pass_number = -1
        self._parts: dict[int, OpenPart] = {}

    def items(self, pass_number: int, steps: Iterable[int]) -> Iterator[Made]:
        """Yield the items of these steps: it is a Make."""
        if pass_number != self._pass_number:
            self.close()
            self._pass_number = pass_number
        for step in steps:
            number, part = divmod(step, self._count)
            opened = self._opened(part, number)
            while held := list(islice(opened.items, 1)):
                opened.due += 1
                if opened.due > number:
                    break
                yield PASSED_OVER
            if not held:
                yield PassEnd(opened.due * self._count + part)
                return
            yield made_of(held.pop(), step)

    def _opened(self, part: int, number: int) -> OpenPart:
        """Return the part at or before this item; one that is beyond it begins anew."""
        found = self._parts.get(part)
        if found is not None and number < found.due:
            end(self._parts.pop(part).items)
            found = None
        if found is None:
            found = self._parts[part] = OpenPart(self._begin(self._pass_number, part))
        return found

    def close(self) -> None:
        """End the work under way."""
        while self._parts:
            end(self._parts.popitem()[1].items)
        self._pass_number = -1


class ReceiverGone(OperationError):
    """The receiver was closed or disconnected before it acknowledged the end of the epoch."""


class Refused(UsageError):
    """The receiver refuses this sender's batches; the message has its reason."""


FAILED = (ReceiverGone, ConnectionDamaged, Refused, NotAdmitted, WrongReceiver)  # links, not their sources

WAITING = "waiting for the receiver"
STANDING_BY = "standing by"
SENDING = "sending"


class Link(Owned):
    """One connection to a receiver, and the steps that are leased over it. Not thread-safe.

    It handles messages of the receiver while it waits. ``max_in_flight`` batches may still be being sent
    while the next one is made. No step from ``steps`` on is one of the source; ``most`` may be leased.
    ``on_change`` is called after each batch, and before each wait for the receiver. With ``bind`` the sender
    listens, and one receiver connects.
    """

    def __init__(
        self,
        endpoint: str,
        hello: list[Buffer],
        make: Make,
        *,
        max_in_flight: int = 0,
        steps: int = wire.UNKNOWN,
        parts: int = 1,
        most: int = 1 << 16,
        bind: bool = False,
        max_reconnect_ms: int = 0,
        auth: SenderAuth | None = None,
        on_change: Callable[[Link], None] = lambda link: None,
    ) -> None:
        self.state = WAITING
        self.batches = self.bytes = 0  # that were sent
        self.is_admitted = self.has_sent_hello = self.is_done = False
        self._is_lost = self._must_send_hello = self._is_probed = False
        self._endpoint = endpoint
        self._hello = hello
        self._make = make
        self._max_in_flight = max_in_flight
        self._total, self._parts, self._most = steps, parts, most
        self._auth = auth
        self._on_change = on_change
        self._refusal = ""
        self._connection = -1  # over which the WELCOME came
        self._session = self._limit = self._last_lease = 0  # the limit is in bytes of a batch
        self._leased: deque[StepRef] = deque()  # the leased steps, all of one pass
        self._drawn: deque[StepRef] = deque()  # the steps that are being made
        self._sending: deque[zmq.MessageTracker] = deque()
        options: dict[int, int] = {
            zmq.SNDHWM: 0,  # the receiver's leases bound it
            zmq.MAXMSGSIZE: MAX_NOTE_BYTES,
            zmq.RECONNECT_IVL: RECONNECT_INTERVAL_MS,
            zmq.RECONNECT_IVL_MAX: max_reconnect_ms,
        }
        secure = auth.secure if auth else None
        self._socket = FrameSocket(
            zmq.DEALER, endpoint, bind=bind, options=options, most_bytes=MAX_NOTE_BYTES, secure=secure
        )

    @property
    def lag(self) -> int:
        """The number of leased steps that have not been sent."""
        return len(self._drawn) + len(self._leased)

    # Steps

    def make_leased_steps(self) -> None:
        """Make the steps that are leased, until the receiver is done.

        Raises ReceiverGone, Refused, what the handshake raises, and what the source raises.
        """
        self.wait_for(lambda: self.is_admitted or self.is_done)
        while not self.is_done:
            self.state = STANDING_BY
            self._drawn.clear()
            self.wait_for(lambda: bool(self._leased) or self.is_done)
            if not self.is_done:
                self._run_pass(self._leased[0].pass_number)

    def _run_pass(self, pass_number: int) -> None:
        """Make the leased steps of a pass until none is left, or the pass is not wanted any more."""
        self.state = SENDING
        with closing(self._make(pass_number, self._steps(pass_number))) as batches:  # type: ignore[type-var]
            while self._wants(pass_number) and self._send_next(batches):
                pass

    def _steps(self, pass_number: int) -> Iterator[int]:
        """Yield the steps of this pass that are leased at present."""
        while self._leased and self._leased[0].pass_number == pass_number and not self._is_lost:
            self._drawn.append(self._leased.popleft())
            yield self._drawn[-1].step
            self._receive_all()

    def _wants(self, pass_number: int) -> bool:
        """Return whether steps of this pass are still wanted. Raises ReceiverGone, Refused."""
        self._receive_all()
        self._check()
        return not self.is_done and (not self._leased or self._leased[0].pass_number == pass_number)

    def _send_next(self, batches: Iterator[Made]) -> bool:
        """Make an item, and send it if it was asked for; return whether there was one. Reports what fails."""
        try:
            for made in islice(batches, 1):
                if isinstance(made, PassEnd):
                    self._end(made.total)
                    return False
                if made is not PASSED_OVER:
                    self._send(made)
                return True
        except FAILED:
            raise
        except Exception as error:
            self.report(error)
            raise
        return False

    def _send(self, made: LoadedStep) -> None:
        """Send the batch of the next drawn step; its memory may still be in use. Raises UsageError."""
        parts = self._delivery(self._drawn[0], made)
        size = sum(len(part) for part in parts[1:])
        if size > self._limit:
            raise UsageError(
                f"a batch of {size:,} bytes is above the receiver's limit of {self._limit:,}; send smaller ones, or "
                "raise its limit_bytes"
            )
        with suppress(zmq.Again):  # disconnected; the event follows
            self._sending.append(self._socket.send_tracked(parts))
        self._drawn.popleft()
        del parts, made
        while len(self._sending) > self._max_in_flight:
            self._wait_until_sent(self._sending[0])
            self._sending.popleft()
        self.batches, self.bytes = self.batches + 1, self.bytes + size
        self._on_change(self)

    def _end(self, total: int) -> None:
        """Report that the pass, or the part of step ``total``, ends before that step."""
        work = self._drawn[0]._replace(step=total)
        self._socket.send(self._note(FrameKind.END, work))
        if self._leased and self._leased[0].pass_number == work.pass_number:
            self._leased = deque(held for held in self._leased if (held.step - total) % self._parts)

    def report(self, error: BaseException) -> None:
        """Report that the next step cannot be made, and wait shortly for the acknowledgement."""
        steps = [*self._drawn, *self._leased]
        if not steps:
            self.leave()
            return
        with suppress(*FAILED, OperationError):
            self._socket.send(self._note(FrameKind.ERROR, steps[0], text=error_text(error)))
            self.wait_for(lambda: self.is_done, ERROR_REPORT_TIMEOUT_S)

    def leave(self) -> None:
        """Send STOP: the steps that are leased to this sender are leased to others at once."""
        if not self.is_done:
            self._socket.send(pack_note(FrameKind.STOP))

    # Messages

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Handle messages until ``holds()``; return False after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while True:
            self._receive_all()
            if holds():
                return True
            self._check()
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self._on_change(self)
            self._socket.wait(min(POLL_INTERVAL_S, remaining))

    def _wait_until_sent(self, tracker: zmq.MessageTracker) -> None:
        """Handle messages until the memory of a message may be used again."""
        while True:
            try:
                return tracker.wait(POLL_INTERVAL_S)
            except zmq.NotDone:
                self._receive_all()
                self._check()

    def _check(self) -> None:
        if self._refusal:
            raise Refused(f"{self._endpoint}: the receiver refuses this sender: {self._refusal}")
        if self._is_lost and not self.is_done:
            raise ReceiverGone(
                f"{self._endpoint}: the receiver was closed or disconnected before the end of this epoch; the "
                "batches that it had taken may be used, the rest is lost"
            )

    def _receive_all(self) -> None:
        """Handle all events and messages that have arrived.

        Raises OperationError where the receiver's messages have no end.
        """
        for event, value in self._socket.events():
            if self._is_lost:
                continue
            if self._auth:
                self._auth.note_event(event, value)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_new = self._socket.binds and not self.is_admitted
                self._must_send_hello = is_new or not self.has_sent_hello
                self._send_hello()
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_lost = value == self._connection if self._socket.binds else self.has_sent_hello
        self._send_hello()  # a socket that binds may not have been ready
        for _ in range(MAX_NOTES):  # also those that a receiver sent before it disconnected
            if (message := self._socket.receive()) is None:
                break
            with suppress(FrameDamaged):
                self._handle(message, read_head(message.parts[0]))
        else:
            raise OperationError(
                f"{self._endpoint}: the peer there sends more messages than a receiver would; is the address "
                "right?"
            )
        if self._is_probed and not self.lag:
            self._socket.send(pack_note(FrameKind.CREDIT, self._last_lease))
        self._is_probed = False

    def _send_hello(self) -> None:
        if self._must_send_hello and self._socket.send(self._hello):
            self._must_send_hello, self.has_sent_hello = False, True

    def _handle(self, message: Message, head: Head) -> None:
        """Handle one message. Raises FrameDamaged where it is to be dropped."""
        if head.kind == FrameKind.WELCOME:
            self._session = wire.number_in(head.description, "session")
            self._admit(message, head)
        elif head.kind == FrameKind.LEASE:
            self._add_lease(wire.read_lease(head))
        elif head.kind == FrameKind.CREDIT:
            self._is_probed = True
        elif head.kind == FrameKind.DONE:
            self.is_done = True
        elif head.kind == FrameKind.STOP:
            self._refusal = wire.text_in(head.description, "text")

    def _admit(self, message: Message, head: Head) -> None:
        self._limit = wire.number_in(head.description, "limit")
        self.is_admitted, self._connection = True, message.connection

    def _add_lease(self, lease: StepLease) -> None:
        """Add the steps that this sender does not hold yet, as it does where an earlier lease expired.

        Steps far beyond its request are left out; the receiver leases them again once the rest is made.
        """
        if self._total != wire.UNKNOWN and lease.stop > self._total:
            raise FrameDamaged(f"a lease ends at step {lease.stop} of {self._total}")
        if self._leased and self._leased[-1].pass_number != lease.pass_number:
            self._leased.clear()
        held = {(work.pass_number, work.step) for work in (*self._leased, *self._drawn)}
        for step in range(lease.start, min(lease.stop, lease.start + self._most - len(held))):
            if (lease.pass_number, step) not in held:
                self._leased.append(StepRef(self._session, lease.id, lease.pass_number, step))
        self._last_lease = lease.id

    def _delivery(self, step: StepRef, made: LoadedStep) -> list[Buffer]:
        return wire.pack_delivery(step, made)

    def _note(self, kind: FrameKind, step: StepRef, **notes: str) -> list[Buffer]:
        return wire.pack_step(kind, step, **notes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close(linger_ms=0 if self.is_done or self._is_lost else LINGER_MS)
