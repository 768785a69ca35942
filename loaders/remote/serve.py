"""The sender of a data machine: makes and sends the batches that are leased to it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.frames.peers import MAX_NAME
from shardprep.loaders.loader.epoch_loader import EpochLoader
from shardprep.loaders.remote.auth.endpoints import check_endpoint
from shardprep.loaders.remote.auth.keys import SenderKeys
from shardprep.loaders.remote.auth.sender_auth import ConnectionDamaged, NotAdmitted, WrongReceiver
from shardprep.loaders.remote.leasing.ledger import AHEAD

from .messages import Delivery, Hello
from .sender_link import Link, ReceiverAway, Refused
from .served_source import Ended, Served, served
from .stats import (
    CLOSED,
    SENDING,
    STANDING_BY,
    WAITING,
    SenderMeter,
    SenderStats,
)

RECEIVER_TIMEOUT_S = 600.0  # for which a sender waits for a receiver
LINK_FAILED = (ReceiverAway, ConnectionDamaged, Refused, NotAdmitted, WrongReceiver)


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
    """Make and send batches for the RemoteSource at ``endpoint`` until it is closed; return what was done.

    ``source`` is a Loader of one rank in all, a FakeData, or a Flow that makes each pass from its number
    alone. Any number of machines may serve one receiver. Each step of a pass is made by one of them, so all
    need the same dataset, seed, batch size and transform, or the same flow; a sender with another one is
    refused. By default the parts of the source are compared. Where that is too strict or too lax (for
    functions of a Flow with different code), give all senders the same text as ``identity``.

    ``endpoint`` is ``tcp://ADDRESS:PORT`` or ``ipc://PATH``. Without ``keys`` it must be on loopback, or
    ``insecure`` be true: then any program on the network can read and change everything. ``name`` has 1 to
    256 characters and stands in the receiver's stats; None is a name made of host and process.

    At most ``ahead`` steps are leased to this sender at a time; a Loader needs at least three more than its
    slots to be kept busy. Where the receiver is away or restarts, this waits up to ``patience`` seconds for
    it, and then makes the steps that it leases. ``report`` is called with the stats about every half second
    and after each batch, in this thread.

    Raises OperationError where no receiver was there for ``patience`` seconds; NotAdmitted, WrongReceiver,
    and Refused with the receiver's reason; UsageError for what cannot be sent; and what the source raises,
    after a report to the receiver, which then leases the steps to others. Ctrl-C ends it and returns the
    leases. The source stays open.
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
        hello.pack()  # raises before a connection is opened
        return _Sender(work, hello, patience, report).run(endpoint, keys)


class _Sender:
    """Serves a source over one connection after the other."""

    def __init__(
        self,
        work: Served,
        hello: Hello,
        receiver_timeout_s: float,
        report: Callable[[SenderStats], None] | None,
    ) -> None:
        self._work = work
        self._hello = hello
        self._receiver_timeout_s = receiver_timeout_s
        self._report = report
        self._meter = SenderMeter()

    def run(self, endpoint: str, keys: SenderKeys | None) -> SenderStats:
        is_done = False
        while not is_done:
            self._meter.state = WAITING
            with Link(
                endpoint,
                keys,
                self._hello,
                max_in_flight=self._work.max_in_flight,
                on_wait=self._report_lag,
            ) as link:
                is_done = self._use_connection(link)
        self._meter.state = CLOSED
        self._report_lag(0)
        return self._meter.read()

    def _use_connection(self, link: Link) -> bool:
        """Run passes until the connection ends; return whether the receiver was closed."""
        try:
            link.enter(self._receiver_timeout_s)
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
        """Make the leased steps of a pass until none is left, or the pass is not wanted any more."""
        self._meter.state = SENDING
        with closing(self._work.make(pass_number, link.steps(pass_number))) as batches:  # type: ignore[type-var]
            while link.wants(pass_number) and self._send_next(link, batches):
                self._report_lag(link.lag)
        self._meter.state = STANDING_BY

    def _send_next(self, link: Link, batches: Iterator[Delivery | Ended]) -> bool:
        """Make and send one batch; return whether there was one. Reports to the receiver what fails."""
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
            link.report_error(error)
            raise

    def _report_lag(self, lag: int) -> None:
        self._meter.lag = lag
        if self._report:
            self._report(self._meter.read())
