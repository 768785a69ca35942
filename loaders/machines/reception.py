"""The receiving end: its senders and their leases, drawn from by one thread at a time and closed by any."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing.util import Finalize
from time import monotonic
from typing import ClassVar

import numpy as np
import zmq

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.owners import Closable, Owner
from shardprep.formats.runtime.progress import byte_count, count_of
from shardprep.loaders.batches.pickling import MemoryPool
from shardprep.loaders.engine.messages import make_error
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.codec import FrameDamaged, FrameKind, Head, pack_note, read_head, unpack_batch
from shardprep.loaders.machines.keys import ReceiverAuth
from shardprep.loaders.machines.ledger import Ledger, SenderFailed, StepRef, Steps
from shardprep.loaders.machines.socket import (
    LINGER_MS,
    MAX_BUFFER_BYTES,
    MAX_TEXT_CHARACTERS,
    POLL_INTERVAL_S,
    FrameSocket,
    Message,
)
from shardprep.loaders.order.epoch import LoadedStep
from shardprep.loaders.order.parts import NO_RECORDS

MAX_BAD_FRAMES = 8  # per peer, before it is dropped
MAX_REMEMBERED = 1000  # dropped peers
MAX_REFUSALS = 100  # in the stats
NO_SENDER_TIMEOUT_S = 5.0  # before the absence of senders is logged
NO_BATCH_TIMEOUT_S = 60.0  # before a warning that connected senders deliver nothing
CLOSE_TIMEOUT_S = 5.0  # the longest wait of close() for the using thread
HANDLED_AT_ONCE = 1000  # messages; a peer that sends without end must not delay the end of a pass, or close()

log = logging.getLogger(__name__)


class ExclusiveUse(Owner):
    """Guards a resource, and calls ``release`` once: in :meth:`close`, or when the current use ends.

    A user that waits calls :meth:`check_open` again and again. ``name`` names the resource in errors.
    """

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        self._name = name
        self._release_resource = release
        self._closed = False
        self._holder: dict[str, object] = {}  # its only value is the using thread, or what released
        self._released = threading.Event()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the resource. Raises UsageError if this is closed, or another thread holds it."""
        user = threading.get_ident()
        self.check_open()
        try:
            # not a lock: Ctrl-C may come between acquire() and the block of its with (cpython#148874)
            if self._holder.setdefault("", user) != user:
                self.check_open()
                name = self._name
                raise UsageError(f"another thread iterates this {name}; use one {name} per thread")
            self.check_open()
            yield
        finally:
            if self._holder.get("") == user:
                self._holder.clear()
            if self._closed:
                self._release()

    def check_open(self) -> None:
        self.refuse_forked(self._name)
        if self._closed:
            raise UsageError(f"this {self._name} is closed; make a new one")

    def close(self) -> None:
        """Wait for the using thread, at most CLOSE_TIMEOUT_S. Idempotent; for any thread.

        Does nothing in a forked copy of the process.
        """
        if not self.was_made_here:
            return
        self._closed = True
        self._release()
        if self._holder.get("") != threading.get_ident():
            self._released.wait(CLOSE_TIMEOUT_S)

    def _release(self) -> None:
        if self._holder.setdefault("", claim := object()) is claim:
            try:
                self._release_resource()
            finally:
                self._released.set()


@dataclass(frozen=True)
class SenderReport:
    """One connected sender.

    ``name`` is the name that the sender gave, ``key`` the name of its authenticated key, "" without keys.
    ``batches`` and ``bytes`` count its deliveries, ``rate`` is in batches per second since it joined, and
    ``lag`` is the number of steps that are leased to it and have not arrived.
    """

    name: str
    key: str
    batches: int
    bytes: int
    rate: float
    lag: int


@dataclass(frozen=True)
class RemoteStats:
    """The counts of a RemoteSource since it was made.

    ``senders`` are the connected ones. ``refused`` has the names and reasons of the last 100 refused senders;
    ``not_admitted`` counts peers that did not complete the handshake. ``batches`` were taken; ``rejected``
    counts damaged frames, ``repeated`` batches that had arrived before, and ``stale`` frames of a finished
    pass or of a peer that was not admitted. ``leases_given_again`` counts leases with steps that were leased
    to another sender. ``waited`` is the time in seconds that the consumer waited for batches.
    """

    senders: tuple[SenderReport, ...]
    refused: tuple[tuple[str, str], ...]
    not_admitted: int
    batches: int
    rejected: int
    repeated: int
    stale: int
    leases_given_again: int
    waited: float

    def __repr__(self) -> str:
        return f"<RemoteStats: {self.batches:,} batches, {len(self.senders)} senders connected, {len(self.refused)} refused>"

    def __str__(self) -> str:
        """Return a summary line, and one for each sender."""
        lines = [
            f"{count_of(self.batches, 'batch')} from {count_of(len(self.senders), 'sender')}; waited {self.waited:.1f} s for them; "
            f"{self.repeated} repeated, {self.stale} stale, {self.rejected} rejected, "
            f"{self.leases_given_again} leases given again, {self.not_admitted} not admitted"
        ]
        lines += [
            f"  {s.name}: {count_of(s.batches, 'batch')}, {s.rate:.1f}/s, lag {s.lag}" for s in self.senders
        ]
        lines += [f"  refused {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines if self.senders else [*lines, "  no sender is connected"])


@dataclass
class Sender:
    """An admitted sender: its HELLO, its authenticated user, and the counts of its new batches."""

    hello: wire.Hello
    user: str
    batches: int = 0
    bytes: int = 0
    bad_frames: int = 0
    joined: float = field(default_factory=monotonic)
    last_batch: float = field(default_factory=monotonic)


@dataclass(eq=False, repr=False)
class Reception:
    """A receiver's socket, senders (by address) and leases. Not thread-safe, except for :meth:`stats`.

    The first sender's ``terms`` bind all others, and must have the ``expected`` facts. ``limit`` is in bytes
    per batch.
    """

    socket: FrameSocket
    auth: ReceiverAuth
    ledger: Ledger[LoadedStep]
    _: KW_ONLY
    limit: int
    expected: wire.Facts = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.terms: wire.SourceTerms | None = None
        self.senders: dict[bytes, Sender] = {}
        self._refused: deque[tuple[str, str]] = deque(maxlen=MAX_REFUSALS)
        self._ignored: deque[bytes] = deque(maxlen=MAX_REMEMBERED)  # peers
        self.sends_done = False  # whether close() sends DONE
        self._memory = MemoryPool()
        self._message: Message | None = None  # being handled
        self._session = secrets.randbits(63)
        self._batches = self._rejected = self._stale = 0
        self._waited = 0.0  # the clock of leases: it stands still while the training process is busy
        self._last_check = 0.0  # on that clock
        self._last_present = self._last_batch = 0.0  # infinite once their absence is logged

    def begin(self, pass_number: int, steps: Steps[LoadedStep]) -> None:
        self.ledger.begin(pass_number, steps)
        self._apply_terms()
        self._grant()

    @property
    def steps(self) -> Steps[LoadedStep]:
        return self.ledger.steps

    def take(self) -> list[LoadedStep]:
        """Return a list of the next batch, empty if it has not been handled yet, and after the pass.

        Raises SenderFailed if a step cannot be made.
        """
        self.receive(lambda: self.steps.has_next)
        if not self.steps.has_next:
            if failure := self.ledger.failure:
                raise failure
            return []
        self._batches += 1
        taken = [self.steps.take()]
        self._grant()
        return taken

    def receive(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Handle what has arrived, until it ``is_enough``."""
        for event, _ in self.socket.events():
            self.auth.note_event(event)
        for _ in range(HANDLED_AT_ONCE):
            if is_enough() or not (message := self._message or self.socket.receive()):
                break
            self._message = message  # to be handled again if Ctrl-C interrupts that
            self._handle(message)
            self._message = None
            self._grant()

    def wait(self) -> None:
        """Wait until something is there to be handled."""
        if self._waited >= self._last_check + POLL_INTERVAL_S:
            self._last_check = self._waited
            self._check_senders()
            return  # what it found counts at once
        began = monotonic()
        self.socket.wait(POLL_INTERVAL_S)
        self._waited += min(monotonic() - began, POLL_INTERVAL_S)  # more if this process was stopped

    def close(self) -> None:
        if self.sends_done:
            self.receive()  # the HELLOs of senders that have just connected
            for address in self.senders:
                self._send_note(address, FrameKind.DONE)
        self.socket.close(linger_ms=LINGER_MS)

    def stats(self) -> RemoteStats:
        return RemoteStats(
            senders=tuple(
                SenderReport(
                    sender.hello.name,
                    self.auth.name_of(sender.user),
                    sender.batches,
                    sender.bytes,
                    sender.batches / max(sender.last_batch - sender.joined, 1e-9),
                    self.ledger.leased_count(address),
                )
                for address, sender in list(self.senders.items())
            ),
            refused=tuple(self._refused),
            not_admitted=self.auth.refused,
            batches=self._batches,
            rejected=self._rejected,
            repeated=self.ledger.repeated,
            stale=self._stale + self.ledger.stale,
            leases_given_again=self.ledger.leases_given_again,
            waited=self._waited,
        )

    def _handle(self, message: Message) -> None:
        if (is_ignored := message.peer in self._ignored) and self.socket.binds:
            return
        if message.parts and not self.auth.admits(message.user):
            self._refuse(message.peer, "its key is no longer in the allow-list")
            return
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            if head.kind == FrameKind.HELLO:
                self._handle_hello(message, head)
            elif sender := self.senders.get(message.peer):
                self._handle_admitted(message, sender, head)
            elif not is_ignored:
                self._stale += 1  # the peer has sent no HELLO
        except FrameDamaged as error:
            self._rejected += 1
            if not (sender := self.senders.get(message.peer)):
                return
            sender.bad_frames += 1
            if sender.bad_frames >= MAX_BAD_FRAMES:
                self._refuse(message.peer, f"it sent {MAX_BAD_FRAMES} bad frames; the last one: {error}")

    def _handle_hello(self, message: Message, head: Head) -> None:
        if head.number != wire.VERSION:
            versions = f"it uses version {head.number} of the wire, not {wire.VERSION}"
            self._refuse(message.peer, f"{versions}; install one release of shardprep on all machines")
            return
        hello = wire.Hello.read(head)
        if message.peer in self.senders and self.socket.binds:
            return  # a repeated one
        for address, sender in list(self.senders.items()):
            # an earlier connection of this sender, or an earlier sender where this socket connects
            if sender.hello.instance == hello.instance or address == message.peer:
                self._forget(address)
        if reason := self._refusal_reason(hello):
            self._refuse(message.peer, reason, name=hello.name)
            return
        self.terms = self.terms or hello.terms
        self._apply_terms()
        welcome = pack_note(FrameKind.WELCOME, wire.VERSION, session=self._session, limit=self.limit)
        self.socket.send(welcome, peer=message.peer)
        self.ledger.add_peer(message.peer, name=hello.name, wants=hello.wants, now=self._waited)
        self.senders[message.peer] = Sender(hello, message.user)
        log.info("%s: sender %s is connected", self.socket.endpoint, hello.name)

    def _refusal_reason(self, hello: wire.Hello) -> str:
        if (hello.terms == wire.UNSHARED) == self.ledger.shares_steps:
            return "send_batches() is for a FrameReceiver or ZMQInput, and serve() for a RemoteSource"
        difference = hello.terms.difference(self.expected)
        if self.terms and not difference:
            difference = hello.terms.difference(self.terms)
        return f"its batches would differ from the expected ones: {difference}" if difference else ""

    def _apply_terms(self) -> None:
        if terms := self.terms:
            self.ledger.in_any_order = terms.picks
            self.ledger.steps = self.steps.divide(terms.parts)
            if self.steps.total is None and terms.steps != wire.UNKNOWN:
                self.steps.total = terms.steps

    def _handle_admitted(self, message: Message, sender: Sender, head: Head) -> None:
        address = message.peer
        if head.kind == FrameKind.DATA:
            self._handle_delivery(message, sender, head)
        elif head.kind == FrameKind.CREDIT:
            self.ledger.record_idle(address, head.number, now=self._waited)
        elif head.kind == FrameKind.STOP:
            self._forget(address, wire.read_text({"text": ""} | head.description, "text"))
        elif head.kind == FrameKind.END:
            if self.ledger.record_end(address, self._check_session(wire.read_step(head))):
                self.dismiss(address)
        elif head.kind == FrameKind.ERROR:
            ref, text = wire.read_step(head), wire.read_text(head.description, "text")
            self.ledger.record_failure(address, self._check_session(ref), text)
            failure = make_error(SenderFailed, f"sender {sender.hello.name} failed", text)
            log.warning("%s: %s", self.socket.endpoint, failure)
            self.dismiss(address)
        else:
            raise FrameDamaged("a sender sent a kind of frame that only receivers send")

    def _handle_delivery(self, message: Message, sender: Sender, head: Head) -> None:
        parts = message.parts[1:]
        if self.ledger.shares_steps:
            ref, step = wire.read_delivery(head, parts, limit_bytes=self.limit, memory=self._memory)
            self._check_session(ref)
            numbers = np.concatenate(step[2:])
            most = sender.hello.terms.records if sender.hello.terms.records != wire.UNKNOWN else math.inf
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < most:
                raise FrameDamaged("a batch has records that do not exist")
        else:  # the batch alone, as a connection takes part in one pass
            batch = unpack_batch(head, parts, limit_bytes=self.limit, memory=self._memory)
            ref = StepRef(self._session, 0, self.ledger.pass_number, head.number)
            step = LoadedStep(head.number, batch, NO_RECORDS)
        if self.ledger.accept(message.peer, ref, step, now=self._waited):
            sender.batches += 1
            sender.bytes += sum(map(len, parts))
            sender.last_batch, self._last_batch = monotonic(), self._waited

    def _check_session(self, ref: StepRef) -> StepRef:
        """Return the reference. Raises FrameDamaged for a step of another session."""
        if ref.session != self._session:
            raise FrameDamaged("a frame belongs to another session")
        return ref

    def _grant(self) -> None:
        for address, lease in self.ledger.grant(self._waited):
            self.socket.send(wire.pack_lease(self._session, lease), peer=address)

    def _check_senders(self) -> None:
        """Forget disconnected senders and expire leases."""
        for address, sender in list(self.senders.items()):
            if not self._send_note(address, FrameKind.CREDIT):
                self._forget(address)
                rest = count_of(len(self.senders), "sender")
                log.warning("%s: sender %s was lost; %s left", self.socket.endpoint, sender.hello.name, rest)
        self.ledger.expire(self._waited)
        self._grant()
        if absence := self.ledger.waits_for:
            if self._waited >= self._last_present + NO_SENDER_TIMEOUT_S:
                self._last_present = math.inf
                log.warning("%s: %s", self.socket.endpoint, absence)
            return
        if self._last_present == math.inf:
            self._last_batch = self._waited
        self._last_present = self._waited
        if self._waited >= self._last_batch + NO_BATCH_TIMEOUT_S:
            self._last_batch = math.inf
            names = ", ".join(sender.hello.name for sender in self.senders.values())[:MAX_TEXT_CHARACTERS]
            advice = "look at the logs there, and check that large packets arrive here (MTU)"
            silent = f"no batch has arrived for {NO_BATCH_TIMEOUT_S:g} s from {names}; {advice}"
            log.warning("%s: %s", self.socket.endpoint, silent)

    def _send_note(self, address: bytes, kind: FrameKind, **notes: str | int) -> bool:
        """Send a frame to a sender; return False if it is disconnected."""
        return self.socket.send(pack_note(kind, 0, **notes), peer=address)

    def dismiss(self, address: bytes) -> None:
        """End a sender's work, and ignore what it still sends."""
        self._send_note(address, FrameKind.DONE)
        self._forget(address)
        self._ignored.append(address)

    def _forget(self, address: bytes, reason: str = "") -> None:
        self.ledger.remove_peer(address, reason)
        self.senders.pop(address, None)

    def _refuse(self, address: bytes, reason: str, *, name: str = "") -> None:
        """Send a peer the reason, and ignore it from now on."""
        sender = self.senders.get(address)
        name, reason = name or (sender.hello.name if sender else "?"), reason[:MAX_TEXT_CHARACTERS]
        self._send_note(address, FrameKind.STOP, text=reason)
        self._forget(address, reason)
        self._refused.append((name, reason))
        self._ignored.append(address)
        log.warning("%s: sender %s was refused: %s", self.socket.endpoint, name, reason)


class Receiver(Owner, Closable, ABC):
    """Base of iterables over the batches of peers: one iteration at a time, in one thread at a time.

    A context manager.
    """

    copy_advice = "an endpoint has one receiver: make it where it is needed"

    _name: ClassVar[str]  # in errors
    _superseded: ClassVar[str]  # the error once another iteration has begun

    batches_never_change = True

    def __init__(
        self,
        endpoint: str | Sequence[str],
        ledger: Ledger[LoadedStep],
        *,
        limit_bytes: int | str,
        bind: bool = True,
        auth: ReceiverAuth | None = None,
        expected: wire.Facts | None = None,
    ) -> None:
        limit = byte_count(limit_bytes, of="limit_bytes")
        auth = auth or ReceiverAuth(None)
        socket = FrameSocket(
            endpoint, bind=bind, peers=True, options={zmq.MAXMSGSIZE: MAX_BUFFER_BYTES}, secure=auth.secure
        )
        self._reception = Reception(socket, auth, ledger, limit=limit, expected=expected or {})
        self.endpoint, self.endpoints = socket.endpoint, socket.endpoints
        self._iteration = 0  # number of the current one
        self._exclusive = ExclusiveUse(self._name, self._reception.close)
        Finalize(self, self._exclusive.close, exitpriority=20)

    def _steps(self, iteration: int) -> Iterator[LoadedStep]:
        return iter(lambda: self._draw(iteration), None)

    def _draw(self, iteration: int) -> LoadedStep | None:
        """Return the next step, None at the end of the iteration."""
        with self._exclusive.use():
            while True:
                self._exclusive.check_open()
                if iteration != self._iteration:
                    raise UsageError(self._superseded)
                if step := self._reception.take():
                    return step.pop()
                if self._reception.steps.is_over:
                    return None
                self._reception.wait()

    def close(self) -> None:
        """End a waiting thread, disconnect the senders and free the endpoint. Idempotent."""
        self._exclusive.close()
