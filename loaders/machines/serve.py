"""The sender of a data machine: it makes and sends the batches that are leased to it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

import numpy as np
import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.batches.passes import end
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.node import PendingNumbers
from shardprep.loaders.loader.epoch_loader import EpochLoader
from shardprep.loaders.loader.run_card import digest_of
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.codec import FrameDamaged, FrameKind, Head, pack_note
from shardprep.loaders.machines.frames import ReceiverLink, error_text, process_name
from shardprep.loaders.machines.handshake import ConnectionDamaged, NotAdmitted, SenderAuth, WrongReceiver
from shardprep.loaders.machines.keys import SenderKeys, check_endpoint
from shardprep.loaders.machines.ledger import AHEAD, StepLease
from shardprep.loaders.machines.socket import MAX_NAME, Message
from shardprep.loaders.order.epoch import LoadedStep

ERROR_REPORT_TIMEOUT_S = 2.0  # for which the sender waits until the receiver has acknowledged an error
MAX_RECONNECT_MS = 2000  # between attempts to connect, after several that failed
MAX_NOTE_BYTES = 1 << 17
MOST_HELD = 2  # times the steps that a sender asks for, as it also keeps the steps of expired leases


WAITING = "waiting for the receiver"
STANDING_BY = "standing by"
SENDING = "sending"
CLOSED = "the receiver was closed"


@dataclass(frozen=True)
class SenderStats:
    """The counts of a sender since :func:`.serve` was called.

    ``state`` is a text: "waiting for the receiver", "standing by", "sending" or "the receiver was closed".
    ``batches`` and ``bytes`` were sent. ``lag`` is the number of steps that are leased to this sender and not
    yet sent, ``connections`` how often a receiver has admitted it, and ``seconds`` the time since the call.
    """

    state: str = WAITING
    batches: int = 0
    bytes: int = 0
    lag: int = 0
    connections: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "bytes": self.bytes,
            "connections": self.connections,
            "seconds": round(self.seconds, 3),
        }


class ReceiverAway(Exception):
    """The connection to the receiver is lost; a new one may succeed."""


class Refused(UsageError):
    """The receiver refuses this sender's batches; the message has its reason."""


MAX_IN_FLIGHT = 4  # batches; fewer leave the wire idle at times, more exceed the caches: measured with 10 MB


@dataclass(frozen=True)
class PassEnd:
    """The pass has no more than ``total`` steps."""

    total: int


PASSED_OVER = None  # an item before the step that is asked for: the sender looks for messages, and draws on

Made = LoadedStep | PassEnd | None


@dataclass(frozen=True)
class ServedSource:
    """A source of which any step of any pass can be made. Equal ``terms`` mean equal batches.

    ``max_in_flight`` batches may still be being sent while the next one is made.

    ``make(pass_number, steps)`` yields the batches of ``steps``, in that order; ``steps`` may be drawn some
    steps ahead. It yields PASSED_OVER for each item that is made only to reach a later one, and ends with
    PassEnd where the pass has no such step. Closing the iterator ends the work. ``close`` ends the work under
    way between iterators; the source itself stays open.
    """

    terms: wire.SourceTerms
    max_in_flight: int
    make: Callable[[int, Iterable[int]], Iterator[Made]]
    close: Callable[[], None] = lambda: None


def served(source: EpochLoader | Flow, identity: str | None) -> ServedSource:
    """Return the source as a ServedSource. Raises UsageError for a source that cannot be served."""
    if identity == "":
        raise UsageError("identity='' would be the same for all sources; leave it out, or give a text")
    if isinstance(source, EpochLoader):  # the receipts count its records
        state = source.state_dict()
        if state["world_size"] != 1:
            raise UsageError("only a Loader of the whole dataset can be served; give it rank=0, world_size=1")
        own = source.identity if identity is None else {"identity": identity}
        facts = own | {"dataset": state["dataset"]}
        terms = wire.SourceTerms(facts, source.batches_per_epoch, len(source.records), picks=True)
        return ServedSource(terms, min(MAX_IN_FLIGHT, source.most_held - 1), source.steps)
    if not isinstance(source, Flow):
        raise UsageError(
            f"a Loader or a Flow can be served, not a {type(source).__name__}; Flow.from_callable takes a function "
            "that returns any iterable"
        )
    items = source.length.items if source.parts == 1 and source.length.is_exact else wire.UNKNOWN
    picks = source.can_pick and items != wire.UNKNOWN  # each item is a batch, and the receipts count them
    facts = {"identity": digest_of(source) if identity is None else identity}
    terms = wire.SourceTerms(facts, items, items, picks=picks, parts=source.parts)
    most, parts = MAX_IN_FLIGHT if source.batches_never_change else 0, OpenParts(source)
    return ServedSource(terms, most, partial(_picked, source) if picks else parts.items, parts.close)


def _picked(flow: Flow, pass_number: int, steps: Iterable[int]) -> Iterator[Made]:
    asked = PendingNumbers(steps)
    with closing(flow.pick(pass_number, asked)) as items:  # type: ignore[type-var]
        yield from map(_item, items, asked.again)


@dataclass
class OpenPart:
    """The items of a part from item ``due`` on."""

    items: Iterator[Any]
    due: int = 0


class OpenParts:
    """The parts of a flow, which stay open during a pass; most flows have one.

    Item i of part p is step i * parts + p.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._pass_number = -1
        self._parts: dict[int, OpenPart] = {}

    def items(self, pass_number: int, steps: Iterable[int]) -> Iterator[Made]:
        """Yield the items of these steps, as :class:`ServedSource` has it."""
        if pass_number != self._pass_number:
            self.close()
            self._pass_number = pass_number
        for step in steps:
            number, part = divmod(step, self._flow.parts)
            opened = self._opened(part, number)
            while held := list(islice(opened.items, 1)):
                opened.due += 1
                if opened.due > number:
                    break
                yield PASSED_OVER
            if not held:
                yield PassEnd(opened.due * self._flow.parts + part)
                return
            yield _item(held.pop(), step)

    def _opened(self, part: int, number: int) -> OpenPart:
        """Return the part at or before this item; one that is beyond it begins anew."""
        found = self._parts.get(part)
        if found is None or number < found.due:
            if found is not None:
                end(found.items)
            flow, pass_number = self._flow, self._pass_number
            items = flow.part(pass_number, part) if flow.parts > 1 else flow.at_pass(pass_number)
            found = self._parts[part] = OpenPart(items)
        return found

    def close(self) -> None:
        while self._parts:
            end(self._parts.popitem()[1].items)
        self._pass_number = -1


def _item(item: Any, step: int) -> LoadedStep:
    return LoadedStep(step, item, np.array([step], np.int64))


NO_MORE = PassEnd(-1)  # of the leased steps
LINK_FAILED = (ReceiverAway, ConnectionDamaged, Refused, NotAdmitted, WrongReceiver)


class _Link(ReceiverLink):
    """One connection to a RemoteSource, and the steps that are leased over it. Not thread-safe.

    ``stats`` go on from those of earlier connections. The key files are read here; a handshake that fails for
    good raises NotAdmitted or WrongReceiver in :meth:`run`.
    """

    def __init__(
        self,
        endpoint: str,
        keys: SenderKeys | None,
        work: ServedSource,
        hello: wire.Hello,
        began: float,
        stats: SenderStats,
        report: Callable[[SenderStats], None] | None,
    ) -> None:
        self.stats = stats
        self._began = began
        self._report = report
        self._work = work
        self._hello = hello
        self._auth = SenderAuth(endpoint, keys)
        super().__init__(
            endpoint, max_note_bytes=MAX_NOTE_BYTES, max_reconnect_ms=MAX_RECONNECT_MS, security=self._auth
        )
        self._welcome = wire.Welcome(session=0, limit=0)
        self._is_admitted = self._has_sent_hello = self._is_probed = False
        self._refusal = ""
        self._leased: deque[wire.StepRef] = deque()  # the leased steps, all of one pass
        self._drawn: deque[wire.StepRef] = deque()  # the steps that are being made
        self._last_lease = 0
        self._sending: deque[zmq.MessageTracker] = deque()

    def run(self, receiver_timeout_s: float) -> bool:
        """Make leased steps until the connection ends; return whether the receiver was closed.

        Raises OperationError where there was no receiver for so many seconds, or Refused.
        """
        try:
            if not self._await(lambda: self._has_sent_hello, receiver_timeout_s):
                raise OperationError(
                    f"{self._endpoint}: no receiver was there for {receiver_timeout_s:g} s; is the address right, "
                    "and one running?"
                )
            self._await(lambda: self._is_admitted or self.is_done)
            self._note(connections=self.stats.connections + 1, state=STANDING_BY)
            while True:
                self._drawn.clear()
                self._await(lambda: bool(self._leased) or self.is_done)
                if self.is_done:
                    return True
                self._run_pass(self._leased[0].pass_number)
        except (ReceiverAway, ConnectionDamaged):
            return False
        except BaseException:
            self._leave()
            raise

    def report_state(self, **changes: Any) -> None:
        """Report the stats, with the number of leased steps that have not been sent."""
        lag = len(self._drawn) + len(self._leased)
        self._note(**({"lag": lag, "seconds": monotonic() - self._began} | changes))
        if self._report:
            self._report(self.stats)

    def _note(self, **changes: Any) -> None:
        self.stats = replace(self.stats, **changes)

    def _run_pass(self, pass_number: int) -> None:
        """Make the leased steps of a pass until none is left, or the pass is not wanted any more."""
        self._note(state=SENDING)
        with closing(self._work.make(pass_number, self._steps(pass_number))) as batches:  # type: ignore[type-var]
            while self._wants(pass_number) and self._send_next(batches):
                pass
        self._note(state=STANDING_BY)

    def _steps(self, pass_number: int) -> Iterator[int]:
        """Yield the steps of this pass that are leased at present."""
        while self._has_lease_of(pass_number):
            self._drawn.append(self._leased.popleft())
            yield self._drawn[-1].step
            self._receive_all()

    def _wants(self, pass_number: int) -> bool:
        """Return whether steps of this pass are still wanted. Raises ReceiverAway, Refused."""
        self._receive_all()
        self._check()
        return not self.is_done and (not self._leased or self._leased[0].pass_number == pass_number)

    def _send_next(self, batches: Iterator[Made]) -> bool:
        """Make an item, and send it if it was asked for; return whether there was one. Reports what fails."""
        try:
            made = next(batches, NO_MORE)
            if isinstance(made, PassEnd):
                if made is not NO_MORE:
                    self._end(made.total)
                return False
            if made is not PASSED_OVER:
                self._send(made)
            return True
        except LINK_FAILED:
            raise
        except Exception as error:
            self._report_error(error)
            raise

    def _send(self, made: LoadedStep) -> None:
        """Send the batch of the next drawn step; its memory may still be in use. Raises UsageError."""
        parts = wire.pack_delivery(self._drawn[0], made)
        size = self._checked_size(parts, self._welcome.limit)
        with suppress(zmq.Again):  # disconnected; the event follows
            self._sending.append(self._socket.send_tracked(parts))
        self._drawn.popleft()
        del parts, made
        while len(self._sending) > self._work.max_in_flight:
            self._await_sent(self._sending[0])
            self._sending.popleft()
        self._note(batches=self.stats.batches + 1, bytes=self.stats.bytes + size)
        self.report_state()

    def _end(self, total: int) -> None:
        """Report that the pass, or the part of step ``total``, ends before that step."""
        work = self._drawn[0]._replace(step=total)
        self._socket.send(work.pack(FrameKind.END))
        if self._has_lease_of(work.pass_number):
            parts = self._hello.terms.parts
            self._leased = deque(held for held in self._leased if (held.step - total) % parts)

    def _report_error(self, error: BaseException) -> None:
        """Report that the next drawn step cannot be made. Waits shortly for the acknowledgement."""
        with suppress(ReceiverAway, OperationError, UsageError):
            if not self._drawn and self._leased:
                self._drawn.append(self._leased.popleft())
            if not self._drawn:
                self._leave()
                return
            self._socket.send(self._drawn[0].pack(FrameKind.ERROR, text=error_text(error)))
            self._await(lambda: self.is_done, ERROR_REPORT_TIMEOUT_S)

    def _leave(self) -> None:
        """Send STOP: the steps that are leased to this sender are leased to others at once."""
        if not self.is_done:
            self._socket.send(pack_note(FrameKind.STOP))

    def _has_lease_of(self, pass_number: int) -> bool:
        return bool(self._leased) and self._leased[0].pass_number == pass_number and not self._is_lost

    def _on_wait(self) -> None:
        self.report_state()

    def _check(self) -> None:
        """Raise Refused or ReceiverAway."""
        if self._refusal:
            raise Refused(f"{self._endpoint}: the receiver refuses this sender: {self._refusal}")
        if self._is_lost and not self.is_done:
            raise ReceiverAway

    def _receive_all(self) -> None:
        for event, value in self._socket.events():
            if self._is_lost:
                continue
            self._auth.note_event(event, value)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._has_sent_hello:
                self._has_sent_hello = self._socket.send(self._hello.pack())
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_lost = self._has_sent_hello
        self._handle_messages()  # also those that a receiver sent before it disconnected
        if self._is_probed and not self._drawn and not self._leased:
            self._socket.send(pack_note(FrameKind.CREDIT, self._last_lease))
        self._is_probed = False

    def _handle(self, message: Message, head: Head) -> None:
        if head.kind == FrameKind.WELCOME:
            self._welcome, self._is_admitted = wire.Welcome.read(head), True
        elif head.kind == FrameKind.LEASE:
            self._add_lease(wire.read_lease(head))
        elif head.kind == FrameKind.CREDIT:
            self._is_probed = True
        elif head.kind == FrameKind.DONE:
            self.is_done = True
        elif head.kind == FrameKind.STOP:
            self._refusal = wire.text_in(head.description, "text")

    def _add_lease(self, lease: StepLease) -> None:
        """Add the steps that this sender does not hold yet, as it does where an earlier lease expired.

        Steps far beyond its request are left out; the receiver leases them again once the rest is made.
        """
        terms = self._hello.terms
        if terms.steps != wire.UNKNOWN and lease.stop > terms.steps:
            raise FrameDamaged(f"a lease ends at step {lease.stop} of {terms.steps}")
        if self._leased and self._leased[-1].pass_number != lease.pass_number:
            self._leased.clear()
        held = {(work.pass_number, work.step) for work in (*self._leased, *self._drawn)}
        most = MOST_HELD * self._hello.wants - len(held)
        for step in range(lease.start, min(lease.stop, lease.start + most)):
            if (lease.pass_number, step) not in held:
                self._leased.append(wire.StepRef(self._welcome.session, lease.id, lease.pass_number, step))
        self._last_lease = lease.id


RECEIVER_TIMEOUT_S = 600.0  # for which a sender waits for a receiver


def serve(
    source: EpochLoader | Flow,
    endpoint: str,
    *,
    keys: SenderKeys | None = None,
    insecure: bool = False,
    name: str | None = None,
    identity: str | None = None,
    ahead: int = AHEAD,
    patience: float = RECEIVER_TIMEOUT_S,
    report: Callable[[SenderStats], None] | None = None,
) -> SenderStats:
    """Make and send batches for the RemoteSource at ``endpoint`` until it is closed.

    Any number of machines may serve one receiver. Each step of a pass is made by one of them, so all need the
    same dataset, seed, batch size and transform, or the same flow; a sender with another one is refused.
    Where the receiver is away or restarts, this waits for it, and then makes the steps that it leases. Ctrl-C
    ends it and returns the leases. The source stays open.

    Args:
        source: A Loader of one rank in all, a FakeData, or a Flow that makes each pass from its number alone.
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH`` of the receiver.
        keys: Keys of this sender and of the receiver. None needs an endpoint on loopback, or ``insecure``.
        insecure: Whether to connect over a network without keys: any program on it can then read and change
            everything.
        name: 1 to 256 characters for the receiver's stats; None is made of host and process.
        identity: A text that all senders must share, in place of comparing the parts of the source, where
            that is too strict or too lax (for functions of a Flow with different code).
        ahead: Number of steps leased to this sender at a time; a Loader needs at least three more than its
            slots to be kept busy.
        patience: Seconds to wait for a receiver.
        report: Called with the stats about every half second and after each batch, in this thread.

    Returns:
        The counts of what was sent.

    Raises:
        OperationError: No receiver was there for ``patience`` seconds.
        NotAdmitted, WrongReceiver: The keys do not fit.
        Refused: The receiver refuses this sender, with its reason.
        UsageError: An argument is not valid, or a batch cannot be sent. What the source raises is raised
            after a report to the receiver, which then leases the steps to others.
    """
    check_endpoint(endpoint, keys, insecure=insecure)
    if ahead < 1 or patience < 0 or (name is not None and not 0 < len(name) <= MAX_NAME):
        raise UsageError(
            f"ahead={ahead}, patience={patience}, name={name!r}: at least 1 step, 0 seconds, and 1 to {MAX_NAME} "
            "characters"
        )
    with closing(served(source, identity)) as work:
        hello = wire.Hello(name or process_name(), secrets.token_hex(8), work.terms, ahead)
        hello.pack()  # raises before a connection is opened
        began, stats, is_done = monotonic(), SenderStats(), False
        while not is_done:
            with _Link(endpoint, keys, work, hello, began, replace(stats, state=WAITING), report) as link:
                is_done = link.run(patience)
            stats = link.stats
        link.report_state(state=CLOSED, lag=0)
        return link.stats
