"""The stats of the last minute of a running loader or flow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from shardprep.loaders.loader.bottleneck import StageLoad, Verdict

KEPT_S = 60.0


class Stats(Protocol):
    """Counts and times of a loader or a flow."""

    @property
    def verdict(self) -> Verdict | None: ...

    @property
    def loads(self) -> tuple[StageLoad, ...]: ...

    def since(self, before: Any) -> Self: ...


S = TypeVar("S", bound=Stats, covariant=True)


class Watchable(Protocol[S]):
    """A Loader or a Flow."""

    def __iter__(self) -> Iterator[Any]: ...

    def stats(self) -> S: ...


class LastMinute:
    """Stats at several times of the last minute. ``rates`` has the rate between each two of them."""

    def __init__(self, now: float, stats: Stats) -> None:
        self._stats = deque([(now, stats)])
        self.rates: deque[float] = deque(maxlen=round(KEPT_S))

    def add(self, now: float, stats: Stats) -> None:
        """Add the stats of now, and forget those that are older than a minute, except the newest of these."""
        verdict = stats.since(self._stats[-1][1]).verdict
        self.rates.append(verdict.rate if verdict else 0.0)
        self._stats.append((now, stats))
        while len(self._stats) > 2 and self._stats[1][0] <= now - KEPT_S:
            self._stats.popleft()

    @property
    def stats(self) -> Stats:
        """What was counted in the last minute."""
        return self._stats[-1][1].since(self._stats[0][1])

    @property
    def seconds(self) -> float:
        """How long the counted time is; a minute at most, and a little."""
        return self._stats[-1][0] - self._stats[0][0]
