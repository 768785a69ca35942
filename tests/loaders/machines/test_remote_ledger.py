"""The ledger: every step of a pass is taken once, whichever peer makes it, also in parts."""

from collections import deque
from collections.abc import Collection

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shardprep.loaders.machines.codec import FrameDamaged
from shardprep.loaders.machines.ledger import LEASE_STEPS, Ledger, ShareLedger, StepLease, StepRef, Steps

A, B, C = b"a", b"b", b"c"
LEASE_SECONDS = 10.0


class Peers(RuleBasedStateMachine):
    """Peers that make their leased steps in order, except for the faults that the rules cause."""

    peers = st.sampled_from([A, B, C])

    @initialize(
        lengths=st.tuples(st.integers(0, 25))
        | st.lists(st.integers(0, 7), min_size=2, max_size=6).map(tuple),
        start=st.integers(0, 6),
        early=st.sets(st.integers(0, 25), max_size=4),
        ahead=st.integers(1, 6),
        ordered=st.booleans(),
        in_any_order=st.booleans(),
        is_known=st.booleans(),
    )
    def begin(
        self,
        lengths: tuple[int, ...],
        start: int,
        early: set[int],
        ahead: int,
        ordered: bool,
        in_any_order: bool,
        is_known: bool,
    ) -> None:
        self.lengths, self.parts, self.ahead, self.ordered = lengths, len(lengths), ahead, ordered
        self.in_any_order = in_any_order
        self.total = lengths[0] if is_known and self.parts == 1 else None
        self.wanted = {n * self.parts + part for part, count in enumerate(lengths) for n in range(count)}
        start = min(start, max(self.wanted, default=-1) + 1)
        taken = {step for step in early & self.wanted if step >= start}
        self.wanted -= {*range(start)} | taken
        self.now, self.delivered = 0.0, list[int]()
        self._begin(start, taken)

    def _begin(self, start: int, taken: Collection[int]) -> None:
        self.ledger: Ledger[int] = Ledger(ahead=self.ahead, lease_seconds=LEASE_SECONDS)
        self.ledger.in_any_order = self.in_any_order
        steps = Steps[int](start=start, total=self.total, taken=taken, ordered=self.ordered, parts=self.parts)
        self.ledger.begin(7, steps)
        self.old = 0  # the steps of another pass that arrived
        self.queues: dict[bytes, deque[StepLease]] = {}
        self.last: dict[bytes, int] = {}
        self.sent: list[tuple[bytes, StepLease, int]] = []

    @rule(chance=st.integers(0, 5))
    def go_on_from_a_state(self, chance: int) -> None:
        """Seldom drop what arrived and was not taken, and all peers."""
        if not chance:
            self._begin(self.ledger.steps.due, self.ledger.steps.taken)

    @rule(peer=peers)
    def join(self, peer: bytes) -> None:
        if peer not in self.queues:
            self.queues[peer], self.last[peer] = deque(), 0
            self.ledger.add_peer(peer, wants=self.ahead, now=self.now)

    @rule(peer=peers)
    def leave(self, peer: bytes) -> None:
        if self.queues.pop(peer, None) is not None:
            self.ledger.remove_peer(peer)

    @rule()
    def grant(self) -> None:
        for peer, lease in self.ledger.grant(self.now):
            assert lease.pass_number == 7
            assert 0 < lease.stop - lease.start <= LEASE_STEPS
            assert lease.stop <= self.ledger.steps.due + self.ahead * len(self.queues)
            self.queues[peer].append(lease)
            self.last[peer] = lease.id

    @rule(peer=peers)
    def send(self, peer: bytes) -> None:
        if queue := self.queues.get(peer):
            lease = queue.popleft()
            self._send_one(peer, lease, lease.start)
            if lease.start + 1 < lease.stop and peer in self.queues:
                queue.appendleft(StepLease(lease.id, 7, lease.start + 1, lease.stop))

    def _send_one(self, peer: bytes, lease: StepLease, step: int) -> None:
        number, part = divmod(step, self.parts)
        if self.parts == 1:
            self._refuse_end(peer, lease, self.ledger.steps.due - 1)
        if number < self.lengths[part]:
            self.ledger.accept(peer, StepRef(0, lease.id, 7, step), step, now=self.now)
            assert self.ledger.stale == self.old
            assert all(self.ledger.steps.is_missing(held) for _, held in self.ledger._windows[peer].steps)
            self.sent.append((peer, lease, step))
            if self.parts == 1:
                self._refuse_end(peer, lease, step)
        else:
            end = self.lengths[part] * self.parts + part
            self.ledger.record_end(peer, StepRef(0, lease.id, 7, end))
            self._refuse_end(peer, lease, end + self.parts)
            self._refuse_end(peer, lease, end - self.parts)

    def _refuse_end(self, peer: bytes, lease: StepLease, end: int) -> None:
        if 0 <= end < self.ledger._end:
            with pytest.raises(FrameDamaged):
                self.ledger.record_end(peer, StepRef(0, lease.id, 7, end))

    @rule(peer=peers)
    def lose_one_on_the_way(self, peer: bytes) -> None:
        if queue := self.queues.get(peer):
            lease = queue.popleft()
            if lease.start + 1 < lease.stop:
                queue.appendleft(StepLease(lease.id, 7, lease.start + 1, lease.stop))

    @rule(place=st.integers(0, 100))
    def repeat(self, place: int) -> None:
        if self.sent:
            peer, lease, step = self.sent[place % len(self.sent)]
            if peer in self.queues:
                before = self.ledger.repeated
                assert not self.ledger.accept(peer, StepRef(0, lease.id, 7, step), step, now=self.now)
                assert self.ledger.repeated == before + 1

    @rule(peer=peers, beyond=st.integers(0, 30))
    def forge(self, peer: bytes, beyond: int) -> None:
        if peer in self.queues:
            for pass_number, step in ((7, self.ledger._end + beyond), (8, 0), (6, 0)):
                assert not self.ledger.accept(peer, StepRef(0, 1, pass_number, step), -1, now=self.now)
            self.old += 3
            assert self.ledger.stale == self.old

    @rule(seconds=st.floats(0, LEASE_SECONDS * 1.5))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @rule(peer=peers)
    def say_idle(self, peer: bytes) -> None:
        if peer in self.queues and not self.queues[peer]:
            self.ledger.record_idle(peer, self.last[peer], now=self.now)

    @rule()
    def take(self) -> None:
        if self.ledger.steps.has_next:
            self.delivered.append(self.ledger.steps.take())

    @invariant()
    def each_is_delivered_once(self) -> None:
        if hasattr(self, "delivered"):
            assert len(set(self.delivered)) == len(self.delivered)
            assert set(self.delivered) <= self.wanted
            if self.ordered:
                assert self.delivered == sorted(self.delivered)
            assert len(self.ledger.steps._arrived) <= 3 * self.ahead

    def teardown(self) -> None:
        """One of the peers and a new one make the steps until none is left."""
        if not hasattr(self, "delivered"):
            return
        self.leave(A)
        self.leave(B)
        self.join(b"new")
        for _ in range(500):
            self.grant()
            for peer in list(self.queues):
                self.send(peer)
                self.say_idle(peer)
            self.take()
            if self.ledger.steps.is_over:
                break
        assert sorted(self.delivered) == sorted(self.wanted)
        assert self.ledger.steps.is_over


TestPeers = Peers.TestCase
TestPeers.settings = settings(deadline=None, max_examples=200, stateful_step_count=60)


def test_a_lease_that_never_reached_its_peer_is_given_again_although_the_peer_answers() -> None:
    ledger: Ledger[int] = Ledger(ahead=2, lease_seconds=LEASE_SECONDS)
    ledger.begin(0, Steps(total=2))
    ledger.add_peer(A, wants=2, now=0)
    for now in (0.0, 0.6 * LEASE_SECONDS, 1.2 * LEASE_SECONDS):
        assert [lease.start for _, lease in ledger.grant(now)] == [0] * (now == 0)
        ledger.record_idle(A, 0, now=now)
    assert [lease.start for _, lease in ledger.grant(now)] == [0]


def test_the_steps_of_a_part_are_leased_again_after_its_owner_ended_it_and_left() -> None:
    ledger: Ledger[int] = Ledger(ahead=2, lease_seconds=LEASE_SECONDS)
    ledger.begin(7, Steps(total=None, parts=2))
    for peer in (A, B):  # A gets steps 0 and 1, then B the part of step 1
        ledger.add_peer(peer, wants=2, now=0)
        steps = [lease.start for _, lease in ledger.grant(0)]
    ledger.record_end(B, StepRef(0, 3, 7, *steps))
    ledger.remove_peer(B)
    ledger.remove_peer(A)
    ledger.add_peer(C, wants=2, now=0)
    assert [lease.start for _, lease in ledger.grant(0)] == [0, 1]


def test_a_peer_gets_leases_once_a_sixteenth_are_free_and_none_in_a_pass_that_failed() -> None:
    shares: ShareLedger[int] = ShareLedger(senders=2, ahead=32)
    for peer in (A, B, C):
        shares.add_peer(peer, wants=1, now=0, name=peer.decode())
    shares.begin(0, Steps(total=None))
    granted = [[lease.stop for _, lease in shares.grant(0)]]
    for step in range(3):
        shares.accept(A, StepRef(0, 0, 0, step), step, now=0)
        granted.append([lease.stop for _, lease in shares.grant(0)])
    shares.record_failure(A, StepRef(0, 0, 0, 3), "boom")
    shares.record_end(B, StepRef(0, 0, 0, 1))
    shares.record_failure(B, StepRef(0, 0, 0, 3), "later")

    assert granted == [[32, 32], [], [34], []]
    assert "boom" in str(shares.failure)  # the first one
    assert not [*shares.grant(0), *shares.open]  # C waits for the next pass
