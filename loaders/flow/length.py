"""How many items a pass has, as far as that can be known without running it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ...formats.errors import UsageError


class Kind(Enum):
    """What is known of a length."""

    EXACT = "exactly"
    AT_MOST = "at most"
    UNKNOWN = "unknown"
    INFINITE = "infinite"


@dataclass(frozen=True)
class Length:
    """``count`` items exactly or at most; for lengths that are unknown or infinite, ``count`` is ``math.inf``.

    Equal by value, picklable. Made by :func:`exact` and :func:`at_most`, or one of UNKNOWN and INFINITE.
    """

    kind: Kind
    count: float

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError(f"a length cannot be {self.count}")

    @property
    def is_exact(self) -> bool:
        return self.kind is Kind.EXACT

    @property
    def is_infinite(self) -> bool:
        return self.kind is Kind.INFINITE

    @property
    def items(self) -> int:
        """The exact number. Raises UsageError where there is none."""
        if not self.is_exact:
            raise UsageError(f"the length of this flow is {self}, and an exact one is needed here")
        return int(self.count)

    def filtered(self) -> Length:
        """Where any item may be left out."""
        return UNKNOWN if math.isinf(self.count) else at_most(int(self.count))

    def times(self, passes: int) -> Length:
        """That many passes, one after the other."""
        return Length(self.kind, self.count * passes) if passes else exact(0)

    def limited(self, count: int) -> Length:
        """The first ``count`` items."""
        if self.is_exact or self.is_infinite:
            return exact(int(min(self.count, count)))
        return at_most(int(min(self.count, count)))

    def batches(self, size: int, *, drop: bool) -> Length:
        """Groups of ``size``; ``drop`` leaves out one that is not full."""
        if math.isinf(self.count):
            return self
        return Length(self.kind, int(self.count) // size if drop else -(-int(self.count) // size))

    def then(self, other: Length) -> Length:
        """Both, one after the other, or interleaved."""
        if self.is_infinite or other.is_infinite:
            return INFINITE
        if Kind.UNKNOWN in (self.kind, other.kind):
            return UNKNOWN
        kind = Kind.EXACT if self.is_exact and other.is_exact else Kind.AT_MOST
        return Length(kind, self.count + other.count)

    def shortest(self, other: Length) -> Length:
        """As long as both have items."""
        known = [length for length in (self, other) if not length.is_infinite]
        if len(known) < 2:
            return known[0] if known else INFINITE
        count = min(self.count, other.count)
        if self.is_exact and other.is_exact:
            return exact(int(count))
        return UNKNOWN if math.isinf(count) else at_most(int(count))

    def __str__(self) -> str:
        return self.kind.value if math.isinf(self.count) else f"{self.kind.value} {int(self.count):,}"


def exact(count: int) -> Length:
    return Length(Kind.EXACT, count)


def at_most(count: int) -> Length:
    return Length(Kind.AT_MOST, count)


UNKNOWN = Length(Kind.UNKNOWN, math.inf)
INFINITE = Length(Kind.INFINITE, math.inf)
