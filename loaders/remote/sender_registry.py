"""The senders that a receiver knows: connected, refused and dropped ones."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from .messages import Hello
from .source_terms import Facts, SourceTerms

MAX_SENDERS = 256
MAX_BAD_FRAMES = 8  # of a peer, which is dropped then
MAX_REMEMBERED = 1000  # addresses of peers that were dropped, or have sent bad frames
MAX_REFUSALS = 100  # that are kept for the stats


@dataclass
class Sender:
    """An admitted sender: its HELLO, the user of its key, and what it has sent."""

    hello: Hello
    user: str
    batches: int = 0
    bytes: int = 0
    joined: float = field(default_factory=monotonic)
    last: float = field(default_factory=monotonic)

    def sent(self, size: int) -> None:
        """Count a batch that was missing."""
        self.batches += 1
        self.bytes += size
        self.last = monotonic()


class Senders:
    """Senders by the address of their connection. One thread changes it, any thread may read."""

    def __init__(self, expected: Facts) -> None:
        self.terms: SourceTerms | None = None
        self._expected = expected  # of every sender, also of the first
        self.present: dict[bytes, Sender] = {}
        self.refused: deque[tuple[str, str]] = deque(maxlen=MAX_REFUSALS)
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        self._bad: OrderedDict[bytes, int] = OrderedDict()

    def refusal_reason(self, hello: Hello) -> str:
        """Return why a sender is refused, "" where it is not. The first sender's terms bind all others."""
        if len(self.present) >= MAX_SENDERS:
            return f"there are {MAX_SENDERS} senders already"
        difference = hello.terms.missing(self._expected)
        if self.terms and not difference:
            difference = hello.terms.difference(self.terms)
        return f"its batches would differ from the expected ones: {difference}" if difference else ""

    def add(self, address: bytes, hello: Hello, user: str) -> None:
        self.present[address] = Sender(hello, user)
        self.terms = self.terms or hello.terms

    def earlier(self, hello: Hello) -> list[bytes]:
        """Return the addresses of earlier connections of the same sender."""
        return [a for a, sender in self.present.items() if sender.hello.instance == hello.instance]

    def drop(self, address: bytes, name: str, reason: str) -> None:
        """Ignore this connection from now on."""
        self.present.pop(address, None)
        self._bad.pop(address, None)
        self.refused.append((name, reason))
        self._dropped[address] = None
        _forget_old(self._dropped)

    def is_dropped(self, address: bytes) -> bool:
        return address in self._dropped

    def count_bad(self, address: bytes) -> bool:
        """Count a bad frame; return whether the peer is to be dropped."""
        self._bad[address] = self._bad.get(address, 0) + 1
        self._bad.move_to_end(address)
        _forget_old(self._bad)
        return self._bad[address] >= MAX_BAD_FRAMES


def _forget_old(known: OrderedDict[bytes, Any]) -> None:
    while len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
