"""A data machine: makes the batches that a training machine asks for, and sends them."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

from ...formats.errors import UsageError
from ..flow.flow import Flow
from ..frame_peers import MAX_NAME
from ..loader import Loader
from .conversation import Delivery, Hello
from .endpoints import check_endpoint
from .handshake import ConnectionDamaged, NotAdmitted, WrongReceiver
from .ledger import AHEAD
from .link import Link, ReceiverAway, Refused
from .security import SenderKeys
from .sender_stats import CLOSED, SENDING, STANDING_BY, WAITING, SenderMeter, SenderStats
from .served import Ended, Served, served

PATIENCE = 600.0
LINK_FAILED = (ReceiverAway, ConnectionDamaged, Refused, NotAdmitted, WrongReceiver)


def serve(
    source: Loader | Flow,
    endpoint: str,
    *,
    keys: SenderKeys | None = None,
    insecure: bool = False,
    name: str | None = None,
    identity: str | None = None,
    ahead: int = AHEAD,
    patience: float = PATIENCE,
    report: Callable[[SenderStats], None] | None = None,
) -> SenderStats:
    """Make the batches that the RemoteSource at ``endpoint`` asks for, until that is closed; what was done then.

    ``source`` is a Loader of the whole dataset, or a Flow. Any number of machines may serve one receiver: each
    step of a pass is made by one of them, so all must have the same: dataset, seed, batch size, transform, or
    the same flow. Whoever has another one is refused. They are told apart by what the source is made of; where that
    says too much or too little (functions of a Flow whose code differs), give all the same text as ``identity``.
    Each pass of a flow must be a function of its number.

    At most ``ahead`` steps are asked for at a time; a Loader works best with at least three more than its slots. Where
    the receiver is away, or starts again, this waits for it up to ``patience`` seconds, and goes on with what
    it asks for then. ``name`` tells the machine in the receiver's stats. Without ``keys`` the endpoint must be
    on loopback, or ``insecure``: then who is on the network reads and changes everything. ``report`` is called
    about every half second, and after each batch, in this thread.

    Raises OperationError where no receiver was there for too long; NotAdmitted, WrongReceiver, and Refused with the
    receiver's reason; UsageError for what cannot be sent; and what the source raises, after the receiver was
    told, which then asks others. Ctrl-C is heard, and gives back what was asked for. The source stays open.
    """
    check_endpoint(endpoint, keys, insecure=insecure)
    if ahead < 1 or patience < 0 or (name is not None and not 0 < len(name) <= MAX_NAME):
        raise UsageError(
            f"ahead={ahead}, patience={patience}, name={name!r}: at least 1 step, 0 seconds, and 1 to {MAX_NAME} "
            "characters"
        )
    with closing(served(source, identity)) as work:
        own_name = name or f"{socket.gethostname()[:64]}:{os.getpid()}"
        hello = Hello(own_name, secrets.token_hex(8), work.terms, ahead)
        hello.pack()  # raises before anything else is done
        return _Sender(work, hello, patience, report).run(endpoint, keys)


class _Sender:
    def __init__(
        self, work: Served, hello: Hello, patience: float, report: Callable[[SenderStats], None] | None
    ) -> None:
        self._work = work
        self._hello = hello
        self._patience = patience
        self._report = report
        self._meter = SenderMeter()

    def run(self, endpoint: str, keys: SenderKeys | None) -> SenderStats:
        is_done = False
        while not is_done:
            self._meter.state = WAITING
            with Link(endpoint, keys, self._hello, on_the_way=self._work.on_the_way, look=self._look) as link:
                is_done = self._converse(link)
        self._meter.state = CLOSED
        self._look(0)
        return self._meter.read()

    def _converse(self, link: Link) -> bool:
        """Whether the receiver was closed for good."""
        try:
            link.enter(self._patience)
            self._meter.connected()
            self._meter.state = STANDING_BY
            while (pass_number := link.next_pass()) is not None:
                self._run_pass(link, pass_number)
            return True
        except (ReceiverAway, ConnectionDamaged):
            return False
        except BaseException:
            link.leave()
            raise

    def _run_pass(self, link: Link, pass_number: int) -> None:
        """Make what is leased of it, until nothing is at hand, or it is not wanted any more."""
        self._meter.state = SENDING
        with closing(self._work.make(pass_number, link.steps(pass_number))) as batches:  # type: ignore[type-var]
            while link.wants(pass_number) and self._send_next(link, batches):
                self._look(link.lag)
        self._meter.state = STANDING_BY

    def _send_next(self, link: Link, batches: Iterator[Delivery | Ended]) -> bool:
        """Whether there was one. The receiver is told what the work raises, and what cannot be sent."""
        try:
            made = next(batches, None)
            if isinstance(made, Delivery):
                self._meter.sent(link.send(made))
                return True
            if made:
                link.end(made.total)
            return False
        except LINK_FAILED:
            raise
        except Exception as error:
            link.tell(error)
            raise

    def _look(self, lag: int) -> None:
        self._meter.lag = lag
        if self._report:
            self._report(self._meter.read())
