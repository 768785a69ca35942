"""Senders of different speeds: none delays the others. The time is simulated, the ledger is real."""

import heapq
import random
from collections.abc import Sequence

import pytest

from shardprep.loaders.machines.ledger import AHEAD, Ledger, StepRef, Steps

STEPS = 2_000


class Simulated:
    """Peers that take ``seconds`` each for a step, and a consumer."""

    def __init__(self, seconds: Sequence[float], *, jitter: float = 0.0, ordered: bool = True) -> None:
        self.seconds = {bytes([n]): each for n, each in enumerate(seconds)}
        self.made = dict.fromkeys(self.seconds, 0)
        self._jitter, self._dice = jitter, random.Random(1)
        self._ledger: Ledger[int] = Ledger(ahead=AHEAD, lease_seconds=1e9)
        self._ledger.begin(0, Steps(total=STEPS, ordered=ordered))
        self._queues: dict[bytes, list[tuple[int, int]]] = {peer: [] for peer in self.seconds}
        self._events: list[tuple[float, bytes]] = []
        self._now = 0.0
        for peer in self.seconds:
            self._ledger.add_peer(peer, wants=AHEAD, now=0.0)

    def run(self, step: float = 0.0) -> float:
        """Return how long a consumer that needs ``step`` seconds for each step takes for all."""
        free = 0.0
        self._grant()
        while not self._ledger.steps.is_over:
            self._now, peer = heapq.heappop(self._events)
            if peer:
                self._make(peer)
            while self._ledger.steps.has_next and free <= self._now:
                self._ledger.steps.take()
                free = self._now + step
                heapq.heappush(self._events, (free, b""))
                self._grant()
            self._grant()
        return self._now

    def _make(self, peer: bytes) -> None:
        lease, step = self._queues[peer].pop(0)
        self._ledger.accept(peer, StepRef(0, lease, 0, step), step, now=self._now)
        self.made[peer] += 1
        if self._queues[peer]:
            self._begin(peer)

    def _grant(self) -> None:
        for peer, lease in self._ledger.grant(self._now):
            was_idle = not self._queues[peer]
            self._queues[peer] += [(lease.id, step) for step in range(lease.start, lease.stop)]
            if was_idle:
                self._begin(peer)

    def _begin(self, peer: bytes) -> None:
        seconds = self.seconds[peer] * self._dice.uniform(1 - self._jitter, 1 + self._jitter)
        heapq.heappush(self._events, (self._now + seconds, peer))


UNEQUAL = ([1, 1], [1, 2], [1, 4], [1, 10], [1, 20], [1, 40], [1, 1, 1, 10], [1, 2, 3, 4, 5])
UNEQUAL += ([1, 10, 10, 10], [1, 1e99])  # the last one never has a batch


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("seconds", UNEQUAL)
def test_together_they_make_nearly_what_they_make_alone(
    seconds: list[float], jitter: float, ordered: bool
) -> None:
    rates = [1 / each for each in seconds]

    assert STEPS / Simulated(seconds, jitter=jitter, ordered=ordered).run() >= 0.9 * sum(rates)


@pytest.mark.parametrize("seconds", [[1, 1], [1, 2], [1, 10]])
def test_where_all_wait_for_the_consumer_no_window_shrinks(seconds: list[float]) -> None:
    peers = Simulated(seconds)
    assert peers.run(step=12.0) >= 12.0 * (STEPS - 1)
    assert min(peers.made.values()) > 0.3 * STEPS
