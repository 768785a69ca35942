"""The receiver of a training process, for the batches that other machines make."""

from __future__ import annotations

import logging
import math
import secrets
import socket as sockets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
import zmq

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.json_record import natural
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.runtime.sizes import count_of
from shardprep.loaders.batches.passes import FrameworkHint
from shardprep.loaders.batches.pickling import MemoryPool
from shardprep.loaders.engine.messages import reported
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.codec import (
    DEFAULT_LIMIT,
    PIECE,
    FrameDamaged,
    FrameKind,
    Head,
    pack_note,
    read_head,
)
from shardprep.loaders.machines.frames import SenderFailed
from shardprep.loaders.machines.keys import ReceiverAuth, ReceiverKeys, check_endpoint
from shardprep.loaders.machines.ledger import AHEAD, Ledger, StepRef, Steps
from shardprep.loaders.machines.socket import (
    LINGER_MS,
    MAX_TEXT_CHARACTERS,
    POLL_INTERVAL_S,
    SPARE_MESSAGES,
    FrameSocket,
    Message,
    Receiver,
    bytes_of_limit,
    endpoints_of,
)
from shardprep.loaders.order.epoch import LoadedStep
from shardprep.loaders.order.receipt import Receipt, Tally

MAX_SENDERS = 256
MAX_BAD_FRAMES = 8  # per peer, before it is dropped
MAX_REMEMBERED = 1000  # dropped peers, and bad frames
MAX_REFUSALS = 100  # in the stats
LATE_HELLO_TIMEOUT_S = 0.5  # the longest time that close() answers HELLOs
NO_SENDER_TIMEOUT_S = 5.0  # before the absence of senders is logged
MAX_LOGGED = 100  # messages
STATE_VERSION = 1
MAX_ENCRYPTION_OVERHEAD = 64  # bytes per buffer; CURVE adds 33
LEASE_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


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
    joined: float = field(default_factory=monotonic)
    last: float = field(default_factory=monotonic)


class Reception(Owned):
    """A receiver's socket, senders (by address) and leases. Not thread-safe, except for :meth:`stats`.

    The first sender's ``terms`` bind all others.
    """

    def __init__(
        self,
        socket: FrameSocket,
        auth: ReceiverAuth,
        *,
        ahead: int,
        lease_seconds: float,
        limit: int,
        expected: wire.Facts | None = None,
    ) -> None:
        self.terms: wire.SourceTerms | None = None
        self.senders: dict[bytes, Sender] = {}
        self._expected = expected or {}  # of every sender
        self._refused: deque[tuple[str, str]] = deque(maxlen=MAX_REFUSALS)
        self._dropped: deque[bytes] = deque(maxlen=MAX_REMEMBERED)  # ignored peers
        self._bad: deque[bytes] = deque(maxlen=MAX_REMEMBERED)  # the sender of each bad frame
        self.sends_done = False  # whether close() sends DONE
        self._socket = socket
        self._auth = auth
        self._limit = limit
        self._ledger: Ledger[LoadedStep] = Ledger(ahead=ahead, lease_seconds=lease_seconds)
        self._memory = MemoryPool()
        self._session = secrets.randbits(63)
        self._batches = self._rejected = self._stale = self._logged = 0
        self._waited = 0.0  # the clock of leases: it stands still while the training process is busy
        self._last_check = self._last_present = 0.0  # on that clock; the latter is infinite once logged

    def begin(self, pass_number: int, steps: Steps[LoadedStep]) -> None:
        """Begin to lease the missing steps of a pass."""
        self._ledger.begin(pass_number, steps)
        self._limit_steps()
        self._grant()

    @property
    def steps(self) -> Steps[LoadedStep]:
        return self._ledger.steps

    def take(self) -> list[LoadedStep]:
        """Return a list of the next batch, empty before it arrives and after the pass.

        Raises SenderFailed if a step cannot be made.
        """
        self._note_events()
        while not self.steps.has_next and (message := self._socket.receive()):
            self._handle(message)
            self._grant()
        if not self.steps.has_next:
            if failure := self._ledger.failure:
                raise reported(SenderFailed, "a step of this pass cannot be made", failure)
            return []
        self._batches += 1
        taken = [self.steps.take()]
        self._grant()
        return taken

    def receive_all(self) -> None:
        """Handle everything that has arrived."""
        self._note_events()
        while message := self._socket.receive():
            self._handle(message)
        self._grant()

    def wait(self, woken: sockets.socket) -> None:
        """Wait until something arrives, or ``woken`` is readable. All messages must be handled."""
        began = monotonic()
        self._socket.wait(POLL_INTERVAL_S, other=woken)
        self._waited += monotonic() - began
        if self._waited >= self._last_check + POLL_INTERVAL_S:
            self._last_check = self._waited
            self._check_senders()

    def close(self) -> None:
        if self.sends_done:
            for address in self.senders:
                self._send_note(address, FrameKind.DONE)
            until = monotonic() + LATE_HELLO_TIMEOUT_S
            while monotonic() < until and (message := self._socket.receive()):
                if message.parts and message.peer not in self.senders and self._auth.admits(message.user):
                    with suppress(FrameDamaged):
                        if read_head(message.parts[0]).kind == FrameKind.HELLO:
                            self._send_note(message.peer, FrameKind.DONE)
        self._socket.close(linger_ms=LINGER_MS)

    def stats(self) -> RemoteStats:
        return RemoteStats(
            senders=tuple(
                SenderReport(
                    sender.hello.name,
                    self._auth.name_of(sender.user),
                    sender.batches,
                    sender.bytes,
                    sender.batches / max(sender.last - sender.joined, 1e-9) if sender.batches else 0.0,
                    self._ledger.held(address),
                )
                for address, sender in list(self.senders.items())
            ),
            refused=tuple(self._refused),
            not_admitted=self._auth.refused,
            batches=self._batches,
            rejected=self._rejected + self._socket.dropped,
            repeated=self._ledger.repeated,
            stale=self._stale + self._ledger.stale,
            leases_given_again=self._ledger.leases_given_again,
            waited=self._waited,
        )

    def _note_events(self) -> None:
        for event, value in self._socket.events():
            self._auth.note_event(event, value)

    def _handle(self, message: Message) -> None:
        if message.peer in self._dropped:
            return
        if message.parts and not self._auth.admits(message.user):
            self._drop(message.peer, "its key is no longer in the allow-list")
            return
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            if head.kind == FrameKind.HELLO:
                self._handle_hello(message, head)
            elif sender := self.senders.get(message.peer):
                self._handle_admitted(message, sender, head)
            else:
                self._stale += 1  # the peer was dropped, or has sent no HELLO
        except FrameDamaged as error:
            self._rejected += 1
            self._bad.append(message.peer)
            if self._bad.count(message.peer) >= MAX_BAD_FRAMES:
                self._drop(message.peer, f"it sent {MAX_BAD_FRAMES} bad frames; the last one: {error}")

    def _handle_hello(self, message: Message, head: Head) -> None:
        if head.number != wire.VERSION:
            self._drop(message.peer, f"it uses version {head.number} of the protocol, not {wire.VERSION}")
            return
        hello = wire.Hello.read(head)
        if message.peer in self.senders:
            raise FrameDamaged("a sender sent HELLO twice")
        for address, sender in list(self.senders.items()):
            if sender.hello.instance == hello.instance:  # an earlier connection of this sender
                self._forget(address)
        if reason := self._refusal_reason(hello):
            self._drop(message.peer, reason, name=hello.name)
            return
        self.senders[message.peer] = Sender(hello, message.user)
        self.terms = self.terms or hello.terms
        self._limit_steps()
        self._ledger.join(message.peer, wants=hello.wants, now=self._waited)
        welcome = pack_note(FrameKind.WELCOME, wire.VERSION, session=self._session, limit=self._limit)
        self._socket.send(welcome, peer=message.peer)

    def _refusal_reason(self, hello: wire.Hello) -> str:
        """Return why a sender is refused, "" if it is not."""
        if len(self.senders) >= MAX_SENDERS:
            return f"there are {MAX_SENDERS} senders already"
        difference = hello.terms.difference(self._expected)
        if self.terms and not difference:
            difference = hello.terms.difference(self.terms)
        return f"its batches would differ from the expected ones: {difference}" if difference else ""

    def _limit_steps(self) -> None:
        if terms := self.terms:
            self._ledger.in_any_order = terms.picks or terms.parts > 1
            self._ledger.steps = self.steps.in_parts(terms.parts)
            if self.steps.total is None and terms.steps != wire.UNKNOWN:
                self.steps.total = terms.steps

    def _handle_admitted(self, message: Message, sender: Sender, head: Head) -> None:
        address = message.peer
        if head.kind == FrameKind.DATA:
            self._handle_delivery(message, sender, head)
        elif head.kind == FrameKind.CREDIT:
            self._ledger.idle(address, head.number, now=self._waited)
        elif head.kind == FrameKind.STOP:
            self._forget(address)
        elif head.kind == FrameKind.END:
            self._ledger.end(address, *self._step_of(wire.read_step(head)))
        elif head.kind == FrameKind.ERROR:
            work, text = wire.read_step(head), wire.text_in(head.description, "text")
            self._ledger.fail(address, *self._step_of(work), text)
            last = text.strip().rpartition("\n")[2]
            self._log("%s: sender %s failed: %s", self._socket.endpoint, sender.hello.name, last)
            self._send_note(address, FrameKind.DONE)
            self._forget(address)
        else:
            raise FrameDamaged("a sender sent a kind of frame that only receivers send")

    def _handle_delivery(self, message: Message, sender: Sender, head: Head) -> None:
        work, made = wire.read_delivery(head, message.parts[1:], limit_bytes=self._limit, memory=self._memory)
        numbers = np.concatenate(made[2:])
        most = sender.hello.terms.records if sender.hello.terms.records != wire.UNKNOWN else math.inf
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < most:
            raise FrameDamaged("a batch has records that do not exist")
        if self._ledger.arrive(message.peer, *self._step_of(work), made, now=self._waited):
            sender.batches += 1
            sender.bytes += sum(len(part) for part in message.parts[1:])
            sender.last = monotonic()

    def _step_of(self, work: StepRef) -> tuple[int, int, int]:
        """Return lease, pass and step. Raises FrameDamaged for a step of another session."""
        if work.session != self._session:
            raise FrameDamaged("a frame belongs to another session")
        return work.lease, work.pass_number, work.step

    def _grant(self) -> None:
        for address, lease in list(self._ledger.grant(self._waited)):
            if not self._socket.send(wire.pack_lease(self._session, lease), peer=address):
                self._forget(address)

    def _check_senders(self) -> None:
        """Forget disconnected senders and expire leases."""
        for address in list(self.senders):
            if not self._send_note(address, FrameKind.CREDIT):
                self._forget(address)
        self._ledger.expire(self._waited)
        self._grant()
        if self.senders:
            self._last_present = self._waited
        elif self._waited >= self._last_present + NO_SENDER_TIMEOUT_S:
            self._last_present = math.inf
            self._log("%s: no sender is connected; waiting for one", self._socket.endpoint)

    def _send_note(self, address: bytes, kind: FrameKind, **notes: str | int) -> bool:
        """Send a frame to a sender; return False if it is disconnected."""
        return self._socket.send(pack_note(kind, 0, **notes), peer=address)

    def _forget(self, address: bytes) -> None:
        self.senders.pop(address, None)
        self._ledger.leave(address)

    def _drop(self, address: bytes, reason: str, *, name: str = "") -> None:
        """Send a peer the reason, and ignore it from now on."""
        sender = self.senders.get(address)
        name = name or (sender.hello.name if sender else "?")
        self._send_note(address, FrameKind.STOP, text=reason[:MAX_TEXT_CHARACTERS])
        self._forget(address)
        self._refused.append((name, reason))
        self._dropped.append(address)
        self._log("%s: sender %s was refused: %s", self._socket.endpoint, name, reason)

    def _log(self, text: str, *values: object) -> None:
        """Log a message that a peer caused, at most MAX_LOGGED in all. Unlike a warning, it never raises."""
        if self._logged < MAX_LOGGED:
            self._logged += 1
            log.warning(text, *values)


@dataclass(frozen=True)
class Position:
    """The progress of a pass: all steps before ``step`` were delivered, and the later ones in ``taken``."""

    pass_number: int = 0
    step: int = 0
    taken: tuple[int, ...] = ()
    receipt: Receipt | None = None


def position_from_json(state: object) -> tuple[Position, wire.SourceTerms | None]:
    """Parse a :meth:`RemoteSource.state_dict` into the position and the known terms. Raises UsageError."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise UsageError(f"not the state of a RemoteSource, or not of version {STATE_VERSION}")
    terms, receipt, taken = state.get("terms"), state.get("receipt"), state.get("taken")
    try:
        return Position(
            natural(state.get("pass")),
            natural(state.get("step")),
            tuple(map(natural, taken if isinstance(taken, list) else [None])),
            None if receipt is None else Receipt.from_json(receipt),
        ), None if terms is None else wire.SourceTerms.from_json(terms)
    except (DataError, UnknownVersion, UsageError, ValueError) as error:
        raise UsageError(f"not the state of a RemoteSource: {error}") from error


class RemoteSource(FrameworkHint, Receiver):
    """Iterable over the batches of the Loader or Flow that other machines :func:`.serve` to ``endpoint``.

    Each iteration is one pass, beginning with pass 0. It yields the batches in step order, each exactly once
    and bit for bit, however many senders there are, and whichever of them die, stop or start during the pass.
    Arrays own their memory, aligned to 64 bytes; the arrays of a list share one block. Encoded images become
    bytes, single numbers arrays without axes, named tuples tuples. Without a sender the iteration waits;
    :meth:`stats` shows it, and it is logged once. The error of a sender that fails is logged, too.

    The first sender determines the batches; a sender with other terms is refused. All frames are checked;
    invalid ones are dropped and counted.

    A context manager. :meth:`close`, and leaving the context without an exception, end the senders; after an
    exception they wait for the next receiver. Closing is idempotent and may be done in any thread; a thread
    that waits for a batch then raises UsageError. One thread at a time may draw. There is one iterator at a
    time: a new one begins the next pass and ends the one before. Neither copyable nor picklable.

    Args:
        endpoint: ``tcp://ADDRESS:PORT`` (IPv6 in brackets) or ``ipc://PATH``; port ``*`` chooses a free one,
            which is in the attribute ``endpoint``. Given a list, the source listens at all of them; these are
            in ``endpoints``.
        keys: Keys of this receiver and of the senders it admits; everything is then encrypted. None needs an
            endpoint on loopback, or ``insecure``.
        insecure: Whether to listen on a network without keys.
        ordered: Whether batches come in step order; False delivers them as they arrive, still exactly once.
        limit_bytes: Maximum size of a batch, in bytes or as "256MiB".
        ahead: Number of steps leased to each sender. No step is further from the one due than ``ahead`` times
            the number of senders, so at most that many batches are in memory.
        lease_seconds: Seconds of waiting after which the steps of a silent sender are leased to another one.
        expected: Values that all senders must have, such as ``{"seed": 2, "batch size": 256}``, or the
            ``{"identity": ...}`` given to the senders. It also keeps out senders of an earlier run.

    Raises:
        UsageError: An argument is not valid.
        OperationError: The endpoint or the keys cannot be used.
        SenderFailed: A step cannot be made by three senders, or by all.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        keys: ReceiverKeys | None = None,
        insecure: bool = False,
        ordered: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
        ahead: int = AHEAD,
        lease_seconds: float = LEASE_TIMEOUT_S,
        expected: Mapping[str, object] | None = None,
    ) -> None:
        for each in endpoints_of(endpoint):
            check_endpoint(each, keys, insecure=insecure)
        if ahead < 1 or not lease_seconds > 0:
            raise UsageError(
                f"ahead={ahead}, lease_seconds={lease_seconds}: at least 1 step, and more than 0 s"
            )
        limit = bytes_of_limit(limit_bytes)
        auth = ReceiverAuth(keys)
        socket = FrameSocket(
            endpoint,
            bind=True,
            options={zmq.MAXMSGSIZE: PIECE + MAX_ENCRYPTION_OVERHEAD},
            secure=auth.secure,
            most_bytes=limit,
            most_waiting=2 * ahead + SPARE_MESSAGES,  # with those of expired leases
        )
        self._ordered = ordered
        self._auth = auth
        self._reception = Reception(
            socket,
            auth,
            ahead=ahead,
            lease_seconds=lease_seconds,
            limit=limit,
            expected={name: str(value) for name, value in (expected or {}).items()},
        )
        self._position = Position()  # of the current iteration
        self._next = self._position  # where the next one begins
        self._is_over = False
        super().__init__(
            socket,
            self._reception.close,
            name="RemoteSource",
            superseded="another iteration of this RemoteSource has begun, or a state was loaded; use two, or end "
            "the first",
        )

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass; one that was left early is not continued. Raises UsageError once closed."""
        with self._exclusive.use():
            self._begin(self._next)
            now = self._position
            self._next = Position(now.pass_number + 1)
            missing = Steps[LoadedStep](start=now.step, total=None, taken=now.taken, ordered=self._ordered)
            self._reception.begin(now.pass_number, missing)
            return self._batches(self._iteration)

    def _begin(self, position: Position) -> None:
        self._iteration += 1
        self._position, self._is_over = position, False

    def _take(self) -> list[Any] | None:
        made, steps, terms = self._reception.take(), self._reception.steps, self._reception.terms
        if made:
            receipt = self.receipt().add(made[0].delivered).skip(made[0].skipped)
            if len(made[0].left_out) or len(made[0].omitted):
                receipt = receipt.leave_out(made[0].left_out, omitted=Tally.of(made[0].omitted))
            self._position = Position(self._position.pass_number, steps.due, tuple(steps.taken), receipt)
        elif steps.is_over and terms and terms.steps == 0:  # a pass without steps leaves all records out
            receipt = Receipt(terms.dataset, self._position.pass_number)
            receipt = receipt.leave_out(range(max(0, terms.records)))
            self._position = replace(self._position, receipt=receipt)
        self._is_over = steps.is_over
        return [made.pop().batch] if made else [] if steps.is_over else None

    def _wait(self, woken: sockets.socket) -> None:
        self._reception.wait(woken)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Return the number of batches of the next iteration. Raises TypeError if it is not known (yet)."""
        self._refuse_sampler()
        return self.batches_per_epoch - self._next.step - len(self._next.taken)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a pass. Raises TypeError if it is not known (yet)."""
        if self._reception.terms is None:
            with suppress(UsageError), self._exclusive.use():
                self._reception.receive_all()
        terms = self._reception.terms
        if terms is None or terms.steps == wire.UNKNOWN:
            reason = "no sender has connected yet" if terms is None else "the senders do not know it either"
            raise TypeError(f"the length of a pass is not known: {reason}")
        return terms.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON. It grows only with ``ordered=False`` and skipped records.

        Between two batches, it counts the first as delivered: after :meth:`load_state_dict`, also in another
        process and with other senders, the iteration continues with the second.
        """
        position, terms = self._next if self._is_over else self._position, self._reception.terms
        return {
            "version": STATE_VERSION,
            "terms": terms.to_json() if terms else None,
            "pass": position.pass_number,
            "step": position.step,
            "taken": list(position.taken),
            "receipt": position.receipt.to_json() if position.receipt else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """End the current iteration; the next one continues where ``state`` was taken.

        From then on only senders with the terms in the state are admitted. Raises UsageError, and changes
        nothing, if the state is not valid or belongs to other batches.
        """
        position, terms = position_from_json(state)
        with self._exclusive.use():
            known = self._reception.terms
            if terms and known and (difference := terms.difference(known)):
                raise UsageError(f"the state belongs to other batches than the senders make: {difference}")
            self._reception.terms = terms or known
            self._begin(position)
            self._next = position

    def receipt(self) -> Receipt:
        """Return the receipt of the current or last pass, over all senders.

        It counts the delivered records of a Loader, or the steps of a Flow.
        """
        terms = self._reception.terms
        return self._position.receipt or Receipt(terms.dataset if terms else "", self._position.pass_number)

    def reload_keys(self) -> None:
        """Read the folder of allowed keys again; senders with removed keys are refused. Thread-safe.

        Raises UsageError or OperationError, and changes nothing, if the folder cannot be used.
        """
        self._auth.reload()

    def stats(self) -> RemoteStats:
        """Return the connected senders and the counts; ``print`` shows them as text. Thread-safe."""
        return self._reception.stats()

    def close(self) -> None:
        """End the senders, wake a waiting thread, and free the endpoint. Idempotent."""
        self.__exit__(None)

    def __exit__(self, *exc: object) -> None:
        self._reception.sends_done |= exc[0] is None
        self._exclusive.close()
