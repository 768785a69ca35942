"""The statistics of receivers and senders."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any

WAITING = "waiting for the receiver"
STANDING_BY = "standing by"
SENDING = "sending"
CLOSED = "the receiver was closed"


@dataclass(frozen=True)
class SenderReport:
    """One connected sender.

    ``name`` is the name that the sender gave, ``key`` the name of the key that it has proved to have, ""
    without keys. ``batches`` and ``bytes`` count what it has delivered, ``rate`` is in batches per second
    since it joined, and ``lag`` is the number of steps that are leased to it and have not arrived.
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

    ``senders`` are those that are connected now. ``refused`` has the names and reasons of the last 100
    senders that were refused, ``not_admitted`` counts peers that did not complete the handshake. ``batches``
    were taken; ``rejected`` counts damaged frames, ``repeated`` batches that had arrived before, and
    ``stale`` frames of a pass that is over or of a peer that was not admitted. ``leases_given_again`` counts
    leases with steps that were leased to another sender. ``waited`` is the time in seconds that the consumer
    waited for batches.
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
        return (
            f"<RemoteStats: {self.batches:,} batches, {len(self.senders)} senders connected, "
            f"{len(self.refused)} refused>"
        )

    def __str__(self) -> str:
        """Return some lines, one for each sender."""
        lines = [
            f"{self.batches:,} batches from {len(self.senders)} senders; waited {self.waited:.1f} s for them; "
            f"{self.repeated} repeated, {self.stale} stale, {self.rejected} rejected, "
            f"{self.leases_given_again} leases given again, {self.not_admitted} not admitted"
        ]
        lines += [f"  {s.name}: {s.batches:,} batches, {s.rate:.1f}/s, lag {s.lag}" for s in self.senders]
        lines += [f"  refused {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines if self.senders else [*lines, "  no sender is connected"])


@dataclass(frozen=True)
class SenderStats:
    """The counts of a sender since :func:`.serve` was called.

    ``state`` is a text: "waiting for the receiver", "standing by", "sending" or "the receiver was closed".
    ``batches`` and ``bytes`` were sent. ``lag`` is the number of steps that are leased to this sender and not
    yet sent, ``connections`` how often a receiver has admitted it, and ``seconds`` the time since the call.
    """

    state: str
    batches: int
    bytes: int
    lag: int
    connections: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "bytes": self.bytes,
            "connections": self.connections,
            "seconds": round(self.seconds, 3),
        }


class SenderMeter:
    """Counts for :class:`SenderStats`. Not thread-safe."""

    def __init__(self) -> None:
        self._began = monotonic()
        self._batches = self._bytes = self._connections = 0
        self.state = WAITING
        self.lag = 0

    def connected(self) -> None:
        """Count a connection to a receiver that admitted this sender."""
        self._connections += 1

    def sent(self, size: int) -> None:
        """Count a batch of ``size`` bytes."""
        self._batches += 1
        self._bytes += size

    def read(self) -> SenderStats:
        seconds = monotonic() - self._began
        return SenderStats(self.state, self._batches, self._bytes, self.lag, self._connections, seconds)
