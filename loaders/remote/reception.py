"""A receiver's socket: hears its senders, asks them for steps, and gives out what is due."""

from __future__ import annotations

import logging
import secrets
import socket as sockets
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

from ..frame_receiver import SenderFailed
from ..frame_socket import FrameSocket, Message
from ..frames import FrameDamaged, Head, Kind, pack_note, read_head
from ..recycled import Recycled
from .conversation import (
    MAX_TEXT,
    VERSION,
    Delivery,
    Hello,
    Welcome,
    Work,
    pack_lease,
    read_delivery,
    text_in,
)
from .gate import Gate
from .ledger import Arrival, Ledger
from .remote_stats import RemoteStats, SenderReport
from .senders import MAX_BAD, Sender, Senders
from .steps import Steps
from .terms import UNKNOWN, Facts

LOOK_AGAIN = 0.5  # seconds after which a waiting thread looks anew, lest a lost notice, or Ctrl-C, hang it
LINGER_MS = 500  # for the last words to senders
LAST_LOOK = 0.5  # seconds for what they have said meanwhile
NOBODY_SECONDS = 5.0  # without a sender, before that is logged
MAX_LOGGED = 100

log = logging.getLogger(__name__)


class Reception:
    """One thread at a time uses it; :meth:`stats` is for any thread."""

    def __init__(
        self,
        socket: FrameSocket,
        gate: Gate,
        *,
        ahead: int,
        lease_seconds: float,
        limit: int,
        expected: Facts | None = None,
    ) -> None:
        self.senders = Senders(expected or {})
        self.says_done = False  # when it is closed
        self._socket = socket
        self._gate = gate
        self._limit = limit
        self._ledger: Ledger[Delivery] = Ledger(ahead=ahead, lease_seconds=lease_seconds)
        self._memory = Recycled()
        self._session = secrets.randbits(63)
        self._batches = self._rejected = self._repeated = self._stale = self._logged = 0
        self._waited = 0.0  # the clock of leases: who trains, and does not wait, lets nothing expire
        self._looked = self._somebody = 0.0  # on that clock
        self._has_told = False

    def begin(self, pass_number: int, steps: Steps[Delivery]) -> None:
        """Have the missing steps of this pass made, as many as the senders' terms say."""
        terms = self.senders.terms
        self._ledger.begin(pass_number, steps, in_any_order=terms is None or terms.picks)
        self._limit_steps()
        self._grant()

    @property
    def steps(self) -> Steps[Delivery]:
        """Those of the pass under way."""
        return self._ledger.steps

    def take(self) -> list[Delivery]:
        """What is due in a list; empty where it has not come, or the pass is over.

        Raises SenderFailed where a step cannot be made.
        """
        self._note_events()
        while not self.steps.has_next and (message := self._socket.receive()):
            self._heard(message)
            self._grant()
        if not self.steps.has_next:
            if failure := self._ledger.failure:
                raise SenderFailed(f"a step of this pass cannot be made:\n{failure}")
            return []
        self._batches += 1
        taken = [self.steps.take()]
        self._grant()
        return taken

    def hear(self) -> None:
        """Whatever has come until now."""
        self._note_events()
        while message := self._socket.receive():
            self._heard(message)
        self._grant()

    def wait(self, woken: sockets.socket) -> None:
        """Until something comes, or ``woken`` can be read; once everything that had come was heard."""
        began = monotonic()
        self._socket.wait(LOOK_AGAIN, other=woken)
        self._waited += monotonic() - began
        if self._waited >= self._looked + LOOK_AGAIN:
            self._looked = self._waited
            self._look()

    def close(self) -> None:
        if self.says_done:
            for address in (*self.senders.present, *self._who_came_late()):
                self._say(address, Kind.DONE)
        self._socket.close(linger_ms=LINGER_MS)

    def _who_came_late(self) -> Iterator[bytes]:
        """Those whose greeting nobody has read yet."""
        until = monotonic() + LAST_LOOK
        while monotonic() < until and (message := self._socket.receive()):
            if message.parts and message.peer not in self.senders.present and self._gate.admits(message.user):
                with suppress(FrameDamaged):
                    if read_head(message.parts[0]).kind == Kind.HELLO:
                        yield message.peer

    def stats(self) -> RemoteStats:
        return RemoteStats(
            senders=tuple(self._report(*known) for known in list(self.senders.present.items())),
            refused=tuple(self.senders.refused),
            not_admitted=self._gate.refused,
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
            self._gate.name_of(sender.user),
            sender.batches,
            sender.bytes,
            sender.batches / seconds if sender.batches else 0.0,
            self._ledger.held(address),
        )

    # What comes

    def _note_events(self) -> None:
        for event, value in self._socket.events():
            self._gate.heard(event, value)

    def _heard(self, message: Message) -> None:
        if self.senders.is_dropped(message.peer):
            return
        if message.parts and not self._gate.admits(message.user):
            self._drop(message.peer, "its key is not in the allow-list any more")
            return
        try:
            head = read_head(message.parts[0] if message.parts else b"")
            if head.kind == Kind.HELLO:
                self._greeted(message, head)
            elif sender := self.senders.present.get(message.peer):
                self._said(message, sender, head)
            else:
                self._stale += 1  # of one who was given up meanwhile, or greets nobody
        except FrameDamaged as error:
            self._rejected += 1
            if self.senders.count_bad(message.peer):
                self._drop(message.peer, f"{MAX_BAD} frames of it were bad; the last one: {error}")

    def _greeted(self, message: Message, head: Head) -> None:
        if head.number != VERSION:
            self._drop(message.peer, f"it speaks version {head.number} of the wire, and not {VERSION}")
            return
        hello = Hello.read(head)
        if message.peer in self.senders.present:
            raise FrameDamaged("a sender greets twice")
        for address in self.senders.earlier(hello):
            self._forget(address)
        if objection := self.senders.objection(hello):
            self._drop(message.peer, objection, name=hello.name)
            return
        self.senders.add(message.peer, hello, message.user)
        self._limit_steps()
        self._ledger.join(message.peer, wants=hello.wants, now=self._waited)
        self._socket.send(Welcome(self._session, self._limit).pack(), peer=message.peer)

    def _limit_steps(self) -> None:
        terms = self.senders.terms
        if terms is not None:
            self._ledger.in_any_order = terms.picks
            if self.steps.total is None and terms.steps != UNKNOWN:
                self.steps.total = terms.steps

    def _said(self, message: Message, sender: Sender, head: Head) -> None:
        address = message.peer
        if head.kind == Kind.DATA:
            self._delivered(message, sender, head)
        elif head.kind == Kind.CREDIT:
            self._ledger.idle(address, head.number, now=self._waited)
        elif head.kind == Kind.STOP:
            self._forget(address)
        elif head.kind == Kind.END:
            self._ledger.end(address, *self._asked(Work.read(head)))
        elif head.kind == Kind.ERROR:
            self._ledger.fail(address, *self._asked(Work.read(head)), text_in(head.description, "text"))
            self._say(address, Kind.DONE)
            self._forget(address)
        else:
            raise FrameDamaged("a sender says what only a receiver says")

    def _delivered(self, message: Message, sender: Sender, head: Head) -> None:
        work, made = read_delivery(head, message.parts[1:], limit_bytes=self._limit, memory=self._memory)
        if not made.is_of(sender.hello.terms.records):
            raise FrameDamaged("a batch is of records that there are not")
        arrival = self._ledger.arrive(message.peer, *self._asked(work), made, now=self._waited)
        if arrival is Arrival.FRESH:
            sender.sent(sum(len(part) for part in message.parts[1:]))
        self._repeated += arrival is Arrival.REPEATED
        self._stale += arrival is Arrival.STALE

    def _asked(self, work: Work) -> tuple[int, int, int]:
        """Lease, pass and step."""
        if work.session != self._session:
            raise FrameDamaged("a frame is of another session")
        return work.lease, work.pass_number, work.step

    # What is to be done

    def _grant(self) -> None:
        for address, lease in list(self._ledger.grant(self._waited)):
            if not self._socket.send(pack_lease(self._session, lease), peer=address):
                self._forget(address)

    def _look(self) -> None:
        """Once all that had come was heard: who cannot be reached has nothing more to say."""
        self._gate.check()
        for address in list(self.senders.present):
            if not self._say(address, Kind.CREDIT):
                self._forget(address)
        self._ledger.expire(self._waited)
        self._grant()
        self._tell_of_nobody()

    def _tell_of_nobody(self) -> None:
        if self.senders.present:
            self._somebody, self._has_told = self._waited, False
        elif not self._has_told and self._waited >= self._somebody + NOBODY_SECONDS:
            self._has_told = True
            self._log("%s: no sender is connected; waiting for one", self._socket.endpoint)

    def _say(self, address: bytes, kind: Kind, **notes: str | int) -> bool:
        """False where it is gone."""
        return self._socket.send(pack_note(kind, 0, **notes), peer=address)

    def _forget(self, address: bytes) -> None:
        self.senders.present.pop(address, None)
        self._ledger.leave(address)

    def _drop(self, address: bytes, reason: str, *, name: str = "") -> None:
        """Tell it why, and never hear it again."""
        sender = self.senders.present.get(address)
        name = name or (sender.hello.name if sender else "?")
        self._say(address, Kind.STOP, text=reason[:MAX_TEXT])
        self.senders.drop(address, name, reason)
        self._ledger.leave(address)
        self._log("%s: sender %s was refused: %s", self._socket.endpoint, name, reason)

    def _log(self, text: str, *values: object) -> None:
        """Within bounds, for others have a hand in it; never raises, as warnings may."""
        if self._logged < MAX_LOGGED:
            self._logged += 1
            log.warning(text, *values)
