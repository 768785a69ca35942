"""The senders that a receiver knows, and what each does in the current epoch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from .bounds import FrameDamaged
from .codec import Head

MAX_NAME = 256  # characters
MAX_PEERS = 1000
MAX_DISMISSED = 1000  # addresses of dismissed peers; their last batches may still arrive


class Role(Enum):
    """The state of a peer."""

    WAITING = "waits for an epoch"
    SENDING = "sends its batches"
    DONE = "has sent all batches"


@dataclass
class Peer:
    """A sender's connection: its address, and the number of batches that were received in order."""

    address: bytes
    name: str
    role: Role = Role.WAITING
    received: int = 0


class Peers:
    """All connected senders, of which at most ``senders`` of different names take part in an epoch.

    Not thread-safe.
    """

    def __init__(self, senders: int) -> None:
        self._senders = senders
        self._peers: dict[bytes, Peer] = {}
        self._dismissed: deque[bytes] = deque(maxlen=MAX_DISMISSED)

    def add(self, address: bytes, head: Head) -> None:
        """Add the sender of a HELLO; a second HELLO changes nothing. Raises FrameDamaged."""
        name = head.description.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or len(self._peers) >= MAX_PEERS:
            raise FrameDamaged("a HELLO has no valid name, or there are too many senders")
        if address not in self._peers:
            self._peers[address] = Peer(address, name)

    def get(self, address: bytes) -> Peer | None:
        return self._peers.get(address)

    def admit_next(self) -> Peer | None:
        """Admit the first waiting sender to the epoch, and return it; None where there is none or no room."""
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
        """The admitted senders that have not finished."""
        return [peer for peer in self._peers.values() if peer.role is Role.SENDING]

    def forget(self, peer: Peer) -> None:
        del self._peers[peer.address]

    def was_dismissed(self, address: bytes) -> bool:
        """Return whether a peer took part in an earlier epoch. Its late frames are not counted as damaged."""
        return address in self._dismissed

    def end_epoch(self) -> list[Peer]:
        """Dismiss all senders that took part, and return those that had not finished."""
        unfinished = self.sending()
        for peer in self._taking_part():
            self.forget(peer)
            self._dismissed.append(peer.address)
        return unfinished

    def _taking_part(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role is not Role.WAITING]
