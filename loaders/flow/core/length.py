"""The number of items of a pass, as far as it is known without running the pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from shardprep.formats.errors import UsageError


class LengthKind(Enum):
    """The kinds of knowledge about a length."""

    EXACT = "exactly"
    AT_MOST = "at most"
    UNKNOWN = "unknown"
    INFINITE = "infinite"


@dataclass(frozen=True)
class Length:
    """The number of items that each pass of a flow has.

    ``kind`` says what is known: the length is exact, an upper bound, unknown or infinite. ``count`` is the
    exact number or the bound, and ``math.inf`` for unknown and infinite lengths. Equal by value, picklable.
    Raises UsageError for a negative ``count``.
    """

    kind: LengthKind
    count: float

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError(f"a length cannot be {self.count}")

    @property
    def is_exact(self) -> bool:
        """Whether ``count`` is the exact number of items."""
        return self.kind is LengthKind.EXACT

    @property
    def is_infinite(self) -> bool:
        """Whether a pass never ends."""
        return self.kind is LengthKind.INFINITE

    @property
    def items(self) -> int:
        """The exact number of items. Raises UsageError where it is not known."""
        if not self.is_exact:
            raise UsageError(f"the length of this flow is {self}, and an exact one is needed here")
        return int(self.count)

    def filtered(self) -> Length:
        """The length after a step that may leave out any item."""
        return UNKNOWN if math.isinf(self.count) else at_most(int(self.count))

    def times(self, passes: int) -> Length:
        """The length of ``passes`` passes, one after the other."""
        return Length(self.kind, self.count * passes) if passes else exact(0)

    def limited(self, count: int) -> Length:
        """The length of the first ``count`` items."""
        if self.is_exact or self.is_infinite:
            return exact(int(min(self.count, count)))
        return at_most(int(min(self.count, count)))

    def batches(self, size: int, *, drop: bool) -> Length:
        """The number of batches of ``size`` items; ``drop`` leaves out a batch that is not full."""
        if math.isinf(self.count):
            return self
        return Length(self.kind, int(self.count) // size if drop else -(-int(self.count) // size))

    def then(self, other: Length) -> Length:
        """The length of both flows, one after the other or interleaved."""
        if self.is_infinite or other.is_infinite:
            return INFINITE
        if LengthKind.UNKNOWN in (self.kind, other.kind):
            return UNKNOWN
        kind = LengthKind.EXACT if self.is_exact and other.is_exact else LengthKind.AT_MOST
        return Length(kind, self.count + other.count)

    def shortest(self, other: Length) -> Length:
        """The length of the shorter of both flows."""
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
    return Length(LengthKind.EXACT, count)


def at_most(count: int) -> Length:
    return Length(LengthKind.AT_MOST, count)


UNKNOWN = Length(LengthKind.UNKNOWN, math.inf)
INFINITE = Length(LengthKind.INFINITE, math.inf)
