"""What a receiver knows of its senders and of what came."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SenderReport:
    """One sender that is connected.

    ``name`` is what it calls itself, ``key`` the name of the key that it has proved to have, "" without keys.
    ``rate`` is in batches per second since it joined, ``lag`` the number of steps leased to it that have not come.
    """

    name: str
    key: str
    batches: int
    bytes: int
    rate: float
    lag: int


@dataclass(frozen=True)
class RemoteStats:
    """Counted since the RemoteSource was made, but for ``senders``, which are those connected now.

    ``refused`` are names and reasons of the last hundred that were let go, ``not_admitted`` how many did not even
    complete the handshake. ``rejected`` frames were damaged, or nobody's that was let in; ``repeated`` batches had
    come before, ``stale`` ones are of a pass that is over. ``waited`` is seconds without a batch that was due.
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

    def __str__(self) -> str:
        """Some lines, one for each sender."""
        lines = [
            f"{self.batches:,} batches from {len(self.senders)} senders; waited {self.waited:.1f} s for them; "
            f"{self.repeated} repeated, {self.stale} stale, {self.rejected} rejected, "
            f"{self.leases_given_again} leases given again, {self.not_admitted} not admitted"
        ]
        lines += [f"  {s.name}: {s.batches:,} batches, {s.rate:.1f}/s, lag {s.lag}" for s in self.senders]
        lines += [f"  refused {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines if self.senders else [*lines, "  no sender is connected"])
