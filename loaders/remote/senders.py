"""The senders that a receiver knows: those that are there, those that were refused, those that were dropped."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from .conversation import Hello
from .terms import Facts, Terms

MAX_SENDERS = 256
MAX_BAD = 8  # frames, after which a peer is not heard any more
REMEMBERED = 1000  # addresses of peers that were dropped, or have sent something bad
REFUSALS = 100


@dataclass
class Sender:
    """One that was let in: its greeting, the key it came with, and what it has sent."""

    hello: Hello
    user: str
    batches: int = 0
    bytes: int = 0
    joined: float = field(default_factory=monotonic)
    last: float = field(default_factory=monotonic)

    def sent(self, size: int) -> None:
        """A batch of it was of use."""
        self.batches += 1
        self.bytes += size
        self.last = monotonic()


class Senders:
    """By their connection's address. One thread changes it, any may read."""

    def __init__(self, expected: Facts) -> None:
        self.terms: Terms | None = None
        self._expected = expected  # of all, also of the first
        self.present: dict[bytes, Sender] = {}
        self.refused: deque[tuple[str, str]] = deque(maxlen=REFUSALS)
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        self._bad: OrderedDict[bytes, int] = OrderedDict()

    def objection(self, hello: Hello) -> str:
        """Why this one cannot join the others, "" where it can; the first one decides what all must have."""
        if len(self.present) >= MAX_SENDERS:
            return f"there are {MAX_SENDERS} senders already"
        difference = hello.terms.lacks(self._expected)
        if self.terms and not difference:
            difference = hello.terms.difference(self.terms)
        return f"it would make other batches than are wanted: {difference}" if difference else ""

    def add(self, address: bytes, hello: Hello, user: str) -> None:
        self.present[address] = Sender(hello, user)
        self.terms = self.terms or hello.terms

    def earlier(self, hello: Hello) -> list[bytes]:
        """Where the same sender was before it connected anew."""
        return [a for a, sender in self.present.items() if sender.hello.instance == hello.instance]

    def drop(self, address: bytes, name: str, reason: str) -> None:
        """Never hear this connection again."""
        self.present.pop(address, None)
        self._bad.pop(address, None)
        self.refused.append((name, reason))
        self._dropped[address] = None
        _forget_old(self._dropped)

    def is_dropped(self, address: bytes) -> bool:
        return address in self._dropped

    def count_bad(self, address: bytes) -> bool:
        """Whether this was one bad frame too many."""
        self._bad[address] = self._bad.get(address, 0) + 1
        self._bad.move_to_end(address)
        _forget_old(self._bad)
        return self._bad[address] >= MAX_BAD


def _forget_old(known: OrderedDict[bytes, Any]) -> None:
    while len(known) > REMEMBERED:
        known.popitem(last=False)
