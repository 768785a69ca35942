"""The sender of a data machine: makes and sends the batches leased to it."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.progress import check_int, check_seconds
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.node import share_numbers
from shardprep.loaders.loader.digest import digest_of
from shardprep.loaders.loader.loader import Loader
from shardprep.loaders.machines import wire
from shardprep.loaders.machines.keys import SenderAuth, SenderKeys, check_endpoint
from shardprep.loaders.machines.ledger import AHEAD
from shardprep.loaders.machines.link import (
    WAITING,
    Link,
    OpenParts,
    Outcome,
    ReceiverGone,
    ServedSource,
    process_name,
    wrap_item,
)

MAX_IN_FLIGHT = 4  # batches; with 10 MB each, fewer leave the wire idle at times, more exceed the caches
RECEIVER_TIMEOUT_S = 600.0  # a sender's longest wait for a receiver
NO_RECEIVER_TIMEOUT_S = 5.0  # before the absence of the receiver is logged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SenderStats:
    """The counts of a sender since :func:`.serve` was called.

    ``state`` is "waiting for the receiver", "standing by", "sending" or "the receiver was closed".
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


def wrap_source(source: Loader | Flow, identity: str | None) -> ServedSource:
    """Wrap a Loader or Flow. Raises UsageError for a source that cannot be served."""
    if identity == "":
        raise UsageError("identity='' would be the same for all sources; leave it out, or give a text")
    if isinstance(source, Loader):  # the receipts count its records
        state = source.state_dict()
        if state["world_size"] != 1 or state["passed"]:
            raise UsageError("a Loader is served as a whole: give it rank=0 and world_size=1, and no skip()")
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
    picks = source.can_pick and items != wire.UNKNOWN  # each item is a batch, and a record in the receipts
    facts = {"identity": digest_of(source) if identity is None else identity}
    terms = wire.SourceTerms(facts, items, items, picks=picks, parts=source.parts)
    most = MAX_IN_FLIGHT if source.batches_never_change else 0
    parts = OpenParts(source.part, source.parts)
    return ServedSource(terms, most, partial(_pick_steps, source) if picks else parts.items, parts.close)


def _pick_steps(flow: Flow, pass_number: int, steps: Iterable[int]) -> Iterator[Outcome]:
    drawn, places = share_numbers(steps, 2)
    with closing(flow.pick(pass_number, drawn)) as items:  # type: ignore[type-var]
        yield from map(wrap_item, items, places)


def serve(
    source: Loader | Flow,
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
    same dataset, seed, batch size and transform, or the same flow; a sender that differs is refused. While
    the receiver is away or restarts, this waits for it. Ctrl-C ends it and returns the leases. The source
    stays open; its place does not matter, because the receiver's state has the position.

    Args:
        source: A Loader with world size 1, or a Flow whose passes depend only on their number.
        endpoint: ``tcp://ADDRESS:PORT`` or ``ipc://PATH`` of the receiver.
        keys: Keys of this sender and of the receiver. None needs an endpoint on loopback, or ``insecure``.
        insecure: Whether to connect over a network without keys: any program on it can then read and change
            everything.
        name: 1 to 256 printable characters for the receiver's stats; by default made from host and process.
        identity: A text that all senders must share. It replaces the comparison of the parts of the source
            where that is too strict or too lax (for functions of a Flow with different code).
        ahead: Number of steps leased to this sender at a time; to stay busy, a Loader needs at least three
            more than it has slots.
        patience: Seconds to wait for a receiver.
        report: Called with the stats about every half second and after each batch, in this thread. None logs
            once that the receiver is not there.

    Returns:
        The final stats.

    Raises:
        OperationError: No receiver was there for ``patience`` seconds.
        NotAdmitted, WrongReceiver: The keys do not match.
        Refused: The receiver refuses this sender, with its reason.
        UsageError: An argument is not valid, or a batch cannot be sent. Errors of the source are raised after
            a report to the receiver, which then leases the steps to others.
    """
    check_endpoint(endpoint, keys, insecure=insecure)
    ahead = check_int(ahead, "ahead", least=1)
    if patience != math.inf:
        check_seconds(patience, "patience")
    with closing(wrap_source(source, identity)) as work:
        began, stats = monotonic(), SenderStats()
        hello = wire.Hello(process_name() if name is None else name, secrets.token_hex(8), work.terms, ahead)

        def add_up(link: Link) -> SenderStats:
            return SenderStats(
                link.state,
                stats.batches + link.batches,
                stats.bytes + link.bytes,
                link.lag,
                stats.connections + link.is_admitted,
                monotonic() - began,
            )

        warned: list[SenderStats] = []
        notify = report or partial(_warn_once, endpoint, warned)
        is_done = False
        while not is_done:
            auth = SenderAuth(endpoint, keys)
            with Link(endpoint, hello, work, auth=auth, on_change=lambda link: notify(add_up(link))) as link:
                is_done = _serve_over(link, endpoint, patience)
            stats = add_up(link)
        stats = replace(stats, state="the receiver was closed", lag=0)
        notify(stats)
        return stats


def _warn_once(endpoint: str, warned: list[SenderStats], stats: SenderStats) -> None:
    if stats.state == WAITING and stats.seconds >= NO_RECEIVER_TIMEOUT_S and not warned:
        warned.append(stats)
        log.warning("%s: no receiver is there; waiting for one", endpoint)


def _serve_over(link: Link, endpoint: str, patience: float) -> bool:
    """Make leased steps until the connection ends; return whether the receiver was closed."""
    try:
        if not link.wait_for(lambda: link.has_sent_hello, patience):
            raise OperationError(
                f"{endpoint}: no receiver was there for {patience:g} s; check the address, and that one is running"
            )
        link.make_leased_steps()
    except ReceiverGone:
        return False
    except BaseException:
        link.leave()
        raise
    return True
