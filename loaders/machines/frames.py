"""Sender and receiver of batches that each sender has of its own, without authentication."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from operator import attrgetter
from typing import Any

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.progress import check_int, check_seconds
from shardprep.loaders.batches.passes import Passes, Source
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.codec import DEFAULT_LIMIT
from shardprep.loaders.machines.ledger import MAX_LEASE, ShareLedger, Steps
from shardprep.loaders.machines.link import Link, OpenParts, ServedSource, process_name
from shardprep.loaders.machines.reception import Receiver
from shardprep.loaders.machines.socket import endpoints_of
from shardprep.loaders.order.epoch import LoadedStep

TOKEN = secrets.token_hex(4)  # tells this process from earlier ones with its PID


class FrameReceiver(Receiver):
    """Iterable over the batches that :func:`send_batches` sends to ``endpoint``; each iteration is one epoch.

    An epoch admits ``senders`` senders, each name once, and ends when each has sent its batches; further
    senders wait for the next epoch. The batches of one sender arrive in its order, exactly once. If a sender
    reports an error, dies during its epoch or loses a batch, SenderFailed is raised; the next iteration
    admits senders again. Leaving an iteration early stops its senders.

    A batch is an array, a list of bytes or text, or a tuple, list or dict of these; arrays are aligned to 64
    bytes. Damaged frames, and frames from peers that were not admitted, are dropped and counted in
    ``rejected``. There is no authentication and no encryption: any program that reaches an endpoint can send
    batches. Use loopback or a trusted network.

    A context manager. ``close()`` is idempotent and may be called from any thread; a thread that waits for a
    batch then raises UsageError. One thread at a time may draw. Neither copyable nor picklable.

    Args:
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH``; port ``*`` chooses a free one, which is in the
            attribute ``endpoint``. Given a list, the receiver listens at all of them; they are in
            ``endpoints``.
        senders: Number of senders per epoch.
        bind: Whether the receiver listens; False connects to one sender that listens.
        limit_bytes: Maximum size of a batch, in bytes or as "256MiB".
        high_water_mark: Number of batches in flight per sender.

    Raises:
        UsageError: An argument is not valid.
        OperationError: The endpoint cannot be used.
    """

    _name = "receiver"
    _superseded = "another iteration of this receiver has begun; end the first, or use two receivers"

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        senders: int = 1,
        bind: bool = True,
        limit_bytes: int | str = DEFAULT_LIMIT,
        high_water_mark: int = 4,
    ) -> None:
        endpoints = endpoints_of(endpoint)
        senders = check_int(senders, "senders", least=1)
        high_water_mark = check_int(high_water_mark, "high_water_mark", least=1)
        if not bind and (senders > 1 or len(endpoints) > 1):
            raise UsageError("bind=False is for one sender and one endpoint")
        self._shares: ShareLedger[LoadedStep] = ShareLedger(senders=senders, ahead=high_water_mark)
        super().__init__(endpoints, self._shares, bind=bind, limit_bytes=limit_bytes)

    @property
    def rejected(self) -> int:
        """Number of dropped messages."""
        stats = self._reception.stats()
        return stats.rejected + stats.stale

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. Raises UsageError once this is closed."""
        with self._exclusive.use():
            self._dismiss_senders()
            self._iteration += 1
            self._reception.begin(self._iteration, Steps(total=None))
            return self._epoch(self._iteration)

    def _epoch(self, number: int) -> Iterator[Any]:
        try:
            yield from map(attrgetter("batch"), self._steps(number))
        finally:
            if number == self._iteration:
                with suppress(UsageError), self._exclusive.use():  # closed: nothing to leave
                    self._dismiss_senders()

    def _dismiss_senders(self) -> None:
        """Dismiss the senders of the current epoch that have not finished."""
        for address in list(self._shares.open):
            self._reception.dismiss(address)


def send_batches(
    batches: Source,
    endpoint: str,
    *,
    bind: bool = False,
    name: str | None = None,
    timeout: float | None = None,
) -> int:
    """Send one epoch to the FrameReceiver at ``endpoint``.

    A batch is an array, a list of bytes or text, or a tuple, list or dict of these. The iteration begins when
    the receiver admits this sender. A batch is drawn when the receiver has room for it and the memory of the
    batch before is free again. Large arrays are not copied. There is no authentication and no encryption: use
    it on loopback or on a trusted network. Ctrl-C ends it.

    Args:
        batches: A Loader, an iterable, or a function that returns one.
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH``.
        bind: Whether the sender listens and one receiver connects; by default the receiver listens.
        name: 1 to 256 printable characters; by default made from host and process. A receiver admits each
            name once per epoch, so threads of one process need different names.
        timeout: Seconds to wait for admission; None waits forever.

    Returns:
        Number of batches that the receiver acknowledged: fewer than all if it left the epoch early.

    Raises:
        OperationError: No receiver admitted this sender within ``timeout``.
        ReceiverGone: The receiver was closed or died.
        Refused: The receiver refuses this sender, with its reason.
        UsageError: A batch cannot be sent or exceeds the receiver's limit. This, and any error of
            ``batches``, is also reported to the receiver.
    """
    source = Passes(batches)
    limit = math.inf if timeout is None else check_seconds(timeout, "timeout")
    name = f"{process_name()}:{TOKEN}" if name is None else name
    hello = wire.Hello(name, secrets.token_hex(8), wire.UNSHARED, MAX_LEASE)
    parts = OpenParts(lambda pass_number, part: source.begin())
    with (
        closing(ServedSource(wire.UNSHARED, 0, parts.items, parts.close)) as work,
        Link(endpoint, hello, work, bind=bind, once=True) as link,
    ):
        if not link.wait_for(lambda: link.lag > 0 or link.is_done, limit):
            raise OperationError(
                f"{endpoint}: no receiver admitted this sender within {timeout} s; check that one is iterating there"
            )
        try:
            link.make_leased_steps()
        except (KeyboardInterrupt, SystemExit) as error:
            link.report(error)
            raise
        return link.batches
