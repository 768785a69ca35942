"""What a sender has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any

WAITING = "waiting for the receiver"
STANDING_BY = "standing by"
SENDING = "sending"
CLOSED = "the receiver was closed"


@dataclass(frozen=True)
class SenderStats:
    """Counted from the beginning of :func:`.serve`.

    ``lag`` is how many steps are leased to this sender and not yet sent, ``connections`` how often a receiver
    has let it in, ``seconds`` how long ago it began.
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
    """Counts for :class:`SenderStats`. One thread uses it."""

    def __init__(self) -> None:
        self._began = monotonic()
        self._batches = self._bytes = self._connections = 0
        self.state = WAITING
        self.lag = 0

    def connected(self) -> None:
        """A receiver has let this sender in."""
        self._connections += 1

    def sent(self, size: int) -> None:
        """A batch of so many bytes is on its way."""
        self._batches += 1
        self._bytes += size

    def read(self) -> SenderStats:
        seconds = monotonic() - self._began
        return SenderStats(self.state, self._batches, self._bytes, self.lag, self._connections, seconds)
