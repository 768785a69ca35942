"""The senders that a receiver knows, and what each does in the present epoch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from .frames import FrameDamaged, Head

MAX_NAME = 256
MAX_PEERS = 1000
REMEMBERED = 1000  # peers that were sent away, whose last batches may still come


class Role(Enum):
    """What a peer does."""

    WAITING = "for an epoch that has room for it"
    SENDING = "its batches"
    DONE = "all of them"


@dataclass
class Peer:
    """A sender's connection: where to answer, and the number of batches that came in order.

    ``owed`` of these were taken without the sender's knowing."""

    address: bytes
    name: str
    role: Role = Role.WAITING
    received: int = 0


class Peers:
    """At most ``senders`` of different names take part in an epoch. Not thread-safe."""

    def __init__(self, senders: int) -> None:
        self._senders = senders
        self._peers: dict[bytes, Peer] = {}
        self._sent_away: deque[bytes] = deque(maxlen=REMEMBERED)

    def add(self, address: bytes, head: Head) -> None:
        """Who greets waits, once however often it greets. Raises FrameDamaged where it cannot be let in."""
        name = head.description.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or len(self._peers) >= MAX_PEERS:
            raise FrameDamaged("a greeting has no name, or comes from one too many")
        if address not in self._peers:
            self._peers[address] = Peer(address, name)

    def get(self, address: bytes) -> Peer | None:
        return self._peers.get(address)

    def let_in(self) -> Peer | None:
        """The next one for which there is room begins to send, in the order in which they came."""
        names = {peer.name for peer in self._taking_part()}
        if len(names) < self._senders:
            for peer in self._peers.values():
                if peer.role is Role.WAITING and peer.name not in names:
                    peer.role = Role.SENDING
                    return peer
        return None

    def all_done(self) -> bool:
        """Whether the epoch is over."""
        return sum(peer.role is Role.DONE for peer in self._peers.values()) == self._senders

    def sending(self) -> list[Peer]:
        """Who has not finished."""
        return [peer for peer in self._peers.values() if peer.role is Role.SENDING]

    def forget(self, peer: Peer) -> None:
        del self._peers[peer.address]

    def was_sent_away(self, address: bytes) -> bool:
        """Whether it took part in an epoch before; what it has still to say is of no interest, and no fault."""
        return address in self._sent_away

    def end_epoch(self) -> list[Peer]:
        """All who took part are forgotten; returns those who had not finished."""
        unfinished = self.sending()
        for peer in self._taking_part():
            self.forget(peer)
            self._sent_away.append(peer.address)
        return unfinished

    def _taking_part(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role is not Role.WAITING]
