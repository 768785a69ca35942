"""The receiving end of a RemoteSource: admits senders, leases steps to them, and takes their batches."""

from __future__ import annotations

import logging
import secrets
import socket as sockets
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

from shardprep.formats.system.owned import Owned
from shardprep.loaders.buffers.memory import Recycled
from shardprep.loaders.engine.protocol.worker_errors import reported
from shardprep.loaders.frames.bounds import FrameDamaged
from shardprep.loaders.frames.codec import FrameKind, Head, pack_note, read_head
from shardprep.loaders.frames.frame_socket import (
    LINGER_MS,
    MAX_TEXT_CHARACTERS,
    POLL_INTERVAL_S,
    FrameSocket,
    Message,
)
from shardprep.loaders.frames.receiver import SenderFailed
from shardprep.loaders.remote.auth.receiver_auth import ReceiverAuth
from shardprep.loaders.remote.leasing.ledger import Arrival, Ledger
from shardprep.loaders.remote.leasing.part_steps import PartSteps
from shardprep.loaders.remote.leasing.step_tracker import Steps

from .messages import (
    VERSION,
    Delivery,
    Hello,
    StepRef,
    Welcome,
    pack_lease,
    read_delivery,
    text_in,
)
from .sender_registry import MAX_BAD_FRAMES, Sender, Senders
from .source_terms import UNKNOWN, Facts
from .stats import RemoteStats, SenderReport

LATE_HELLO_TIMEOUT_S = 0.5  # for which close() reads the HELLOs that have arrived
NO_SENDER_TIMEOUT_S = 5.0  # without a sender, before that is logged
MAX_LOGGED = 100  # messages

log = logging.getLogger(__name__)


class Reception(Owned):
    """The socket, the senders and the leases. Not thread-safe, except for :meth:`stats`."""

    def __init__(
        self,
        socket: FrameSocket,
        auth: ReceiverAuth,
        *,
        ahead: int,
        lease_seconds: float,
        limit: int,
        expected: Facts | None = None,
    ) -> None:
        self.senders = Senders(expected or {})
        self.sends_done = False  # whether close() sends DONE
        self._socket = socket
        self._auth = auth
        self._limit = limit
        self._ledger: Ledger[Delivery] = Ledger(ahead=ahead, lease_seconds=lease_seconds)
        self._memory = Recycled()
        self._session = secrets.randbits(63)
        self._batches = self._rejected = self._repeated = self._stale = self._logged = 0
        self._waited = 0.0  # the clock of leases, which do not expire while the training process is busy
        self._last_check = self._last_present = 0.0  # on that clock
        self._has_logged_absence = False

    def begin(self, pass_number: int, steps: Steps[Delivery]) -> None:
        """Lease the missing steps of this pass, up to the number in the senders' terms."""
        self._ledger.begin(pass_number, steps, in_any_order=True)
        self._limit_steps()
        self._grant()

    @property
    def steps(self) -> Steps[Delivery]:
        """The steps of the current pass."""
        return self._ledger.steps

    def take(self) -> list[Delivery]:
        """Return the batch that is due in a list, which is empty until it arrives, and after the pass.

        Raises SenderFailed where a step cannot be made.
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
        """Wait until something arrives, or ``woken`` can be read. Called when all messages were handled."""
        began = monotonic()
        self._socket.wait(POLL_INTERVAL_S, other=woken)
        self._waited += monotonic() - began
        if self._waited >= self._last_check + POLL_INTERVAL_S:
            self._last_check = self._waited
            self._check_senders()

    def close(self) -> None:
        if self.sends_done:
            for address in (*self.senders.present, *self._late_peers()):
                self._send_note(address, FrameKind.DONE)
        self._socket.close(linger_ms=LINGER_MS)

    def _late_peers(self) -> Iterator[bytes]:
        """Yield the peers with a HELLO that has not been read yet."""
        until = monotonic() + LATE_HELLO_TIMEOUT_S
        while monotonic() < until and (message := self._socket.receive()):
            if message.parts and message.peer not in self.senders.present and self._auth.admits(message.user):
                with suppress(FrameDamaged):
                    if read_head(message.parts[0]).kind == FrameKind.HELLO:
                        yield message.peer

    def stats(self) -> RemoteStats:
        return RemoteStats(
            senders=tuple(self._report(*known) for known in list(self.senders.present.items())),
            refused=tuple(self.senders.refused),
            not_admitted=self._auth.refused,
            batches=self._batches,
            rejected=self._rejected,
            repeated=self._repeated,
            stale=self._stale,
            leases_given_again=self._ledger.leases_given_again,
            waited=self._waited,
        )

    def _report(self, address: bytes, sender: Sender) -> SenderReport:
        seconds = max(sender.last - sender.joined, 1e-9)
        return SenderReport(
            sender.hello.name,
            self._auth.name_of(sender.user),
            sender.batches,
            sender.bytes,
            sender.batches / seconds if sender.batches else 0.0,
            self._ledger.held(address),
        )

    # Received messages

    def _note_events(self) -> None:
        for event, value in self._socket.events():
            self._auth.note_event(event, value)

    def _handle(self, message: Message) -> None:
        if self.senders.is_dropped(message.peer):
            return
        if message.parts and not self._auth.admits(message.user):
            self._drop(message.peer, "its key is not in the allow-list any more")
            return
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            if head.kind == FrameKind.HELLO:
                self._handle_hello(message, head)
            elif sender := self.senders.present.get(message.peer):
                self._handle_admitted(message, sender, head)
            else:
                self._stale += 1  # of a peer that was dropped, or has sent no HELLO
        except FrameDamaged as error:
            self._rejected += 1
            if self.senders.count_bad(message.peer):
                self._drop(message.peer, f"{MAX_BAD_FRAMES} frames of it were bad; the last one: {error}")

    def _handle_hello(self, message: Message, head: Head) -> None:
        if head.number != VERSION:
            self._drop(message.peer, f"it uses version {head.number} of the protocol, and not {VERSION}")
            return
        hello = Hello.read(head)
        if message.peer in self.senders.present:
            raise FrameDamaged("a sender sends HELLO twice")
        for address in self.senders.earlier(hello):
            self._forget(address)
        if reason := self.senders.refusal_reason(hello):
            self._drop(message.peer, reason, name=hello.name)
            return
        self.senders.add(message.peer, hello, message.user)
        self._limit_steps()
        self._ledger.join(message.peer, wants=hello.wants, now=self._waited)
        self._socket.send(Welcome(self._session, self._limit).pack(), peer=message.peer)

    def _limit_steps(self) -> None:
        terms = self.senders.terms
        if terms is not None:
            self._ledger.in_any_order = terms.picks or terms.parts > 1
            if terms.parts > 1 and not isinstance(self.steps, PartSteps):
                self._ledger.steps = PartSteps.of(self.steps, terms.parts)
            if self.steps.total is None and terms.steps != UNKNOWN:
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
            self._ledger.end(address, *self._step_of(StepRef.read(head)))
        elif head.kind == FrameKind.ERROR:
            self._ledger.fail(address, *self._step_of(StepRef.read(head)), text_in(head.description, "text"))
            self._send_note(address, FrameKind.DONE)
            self._forget(address)
        else:
            raise FrameDamaged("a frame from a sender is of a kind that only receivers send")

    def _handle_delivery(self, message: Message, sender: Sender, head: Head) -> None:
        work, made = read_delivery(head, message.parts[1:], limit_bytes=self._limit, memory=self._memory)
        if not made.is_of(sender.hello.terms.records):
            raise FrameDamaged("a batch is of records that do not exist")
        arrival = self._ledger.arrive(message.peer, *self._step_of(work), made, now=self._waited)
        if arrival is Arrival.FRESH:
            sender.sent(sum(len(part) for part in message.parts[1:]))
        self._repeated += arrival is Arrival.REPEATED
        self._stale += arrival is Arrival.STALE

    def _step_of(self, work: StepRef) -> tuple[int, int, int]:
        """Return lease, pass and step. Raises FrameDamaged for another session."""
        if work.session != self._session:
            raise FrameDamaged("a frame is of another session")
        return work.lease, work.pass_number, work.step

    # Leases and checks

    def _grant(self) -> None:
        for address, lease in list(self._ledger.grant(self._waited)):
            if not self._socket.send(pack_lease(self._session, lease), peer=address):
                self._forget(address)

    def _check_senders(self) -> None:
        """Forget disconnected senders and expire leases. Called when all messages were handled."""
        self._auth.check()
        for address in list(self.senders.present):
            if not self._send_note(address, FrameKind.CREDIT):
                self._forget(address)
        self._ledger.expire(self._waited)
        self._grant()
        self._log_absence()

    def _log_absence(self) -> None:
        if self.senders.present:
            self._last_present, self._has_logged_absence = self._waited, False
        elif not self._has_logged_absence and self._waited >= self._last_present + NO_SENDER_TIMEOUT_S:
            self._has_logged_absence = True
            self._log("%s: no sender is connected; waiting for one", self._socket.endpoint)

    def _send_note(self, address: bytes, kind: FrameKind, **notes: str | int) -> bool:
        """Return False where the sender is disconnected."""
        return self._socket.send(pack_note(kind, 0, **notes), peer=address)

    def _forget(self, address: bytes) -> None:
        self.senders.present.pop(address, None)
        self._ledger.leave(address)

    def _drop(self, address: bytes, reason: str, *, name: str = "") -> None:
        """Send the reason to a peer, and ignore it from now on."""
        sender = self.senders.present.get(address)
        name = name or (sender.hello.name if sender else "?")
        self._send_note(address, FrameKind.STOP, text=reason[:MAX_TEXT_CHARACTERS])
        self.senders.drop(address, name, reason)
        self._ledger.leave(address)
        self._log("%s: sender %s was refused: %s", self._socket.endpoint, name, reason)

    def _log(self, text: str, *values: object) -> None:
        """Log at most MAX_LOGGED messages, as peers cause them. Does not raise, as warnings might."""
        if self._logged < MAX_LOGGED:
            self._logged += 1
            log.warning(text, *values)
