"""The ledger: every step of a pass is taken once, whichever peer makes it, also in parts."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shardprep.loaders.machines.codec import FrameDamaged
from shardprep.loaders.machines.ledger import LEASE_STEPS, Ledger, StepLease, Steps
from shardprep.loaders.remote import RemoteSource
from support.remote_ends import ANY_PORT, SOURCES, line_of, locally, programs, same, wired

A, B, C = b"a", b"b", b"c"
LEASE_SECONDS = 10.0


def ledger(
    *peers: bytes, steps: int | None = 8, start: int = 0, ahead: int = 4, **given: bool
) -> Ledger[int]:
    """Return a ledger at the beginning of pass 0, with these peers."""
    made: Ledger[int] = Ledger(ahead=ahead, lease_seconds=LEASE_SECONDS)
    made.in_any_order = given.get("in_any_order", True)
    made.begin(0, Steps(start=start, total=steps, ordered=given.get("ordered", True)))
    for peer in peers:
        made.join(peer, wants=ahead, now=0.0)
    return made


def granted(made: Ledger[int], now: float = 0.0) -> list[tuple[bytes, int, int]]:
    return [(peer, lease.start, lease.stop) for peer, lease in made.grant(now)]


def taken(made: Ledger[int]) -> list[int]:
    found = []
    while made.steps.has_next:
        found.append(made.steps.take())
    return found


class Peers(RuleBasedStateMachine):
    """Peers that make their leased steps in order, except for the faults that the rules cause."""

    peers = st.sampled_from([A, B, C])

    @initialize(
        steps=st.integers(0, 25),
        start=st.integers(0, 6),
        early=st.sets(st.integers(0, 25), max_size=4),
        ahead=st.integers(1, 6),
        ordered=st.booleans(),
        in_any_order=st.booleans(),
        is_known=st.booleans(),
    )
    def begin(
        self,
        steps: int,
        start: int,
        early: set[int],
        ahead: int,
        ordered: bool,
        in_any_order: bool,
        is_known: bool,
    ) -> None:
        self.now, self.old = 0.0, 0  # the steps of another pass that arrived
        self.steps = max(steps, start, *early, 0) + 1 if early else max(steps, start)
        self.ordered, self.ahead = ordered, ahead
        self.ledger: Ledger[int] = Ledger(ahead=ahead, lease_seconds=LEASE_SECONDS)
        self.before = set(range(start)) | early
        taken = {step for step in early if step > start}
        if start in early:
            taken.add(start)
        self.ledger.in_any_order = in_any_order
        total = self.steps if is_known else None
        self.ledger.begin(7, Steps(start=start, total=total, taken=taken, ordered=ordered))
        self.queues: dict[bytes, deque[StepLease]] = {}
        self.last: dict[bytes, int] = {}
        self.sent: list[tuple[bytes, StepLease, int]] = []
        self.delivered: list[int] = []

    @rule(peer=peers)
    def join(self, peer: bytes) -> None:
        if peer not in self.queues:
            self.queues[peer], self.last[peer] = deque(), 0
            self.ledger.join(peer, wants=self.ahead, now=self.now)

    @rule(peer=peers)
    def leave(self, peer: bytes) -> None:
        if self.queues.pop(peer, None) is not None:
            self.ledger.leave(peer)

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
        if step >= self.steps:
            self.ledger.end(peer, lease.id, 7, self.steps)
            self.queues[peer].clear()
            return
        self.ledger.arrive(peer, lease.id, 7, step, step, now=self.now)
        assert self.ledger.stale == self.old
        self.sent.append((peer, lease, step))

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
                assert not self.ledger.arrive(peer, lease.id, 7, step, step, now=self.now)
                assert self.ledger.repeated == before + 1

    @rule(peer=peers, step=st.integers(0, 30), lease=st.integers(1000, 2000))
    def forge(self, peer: bytes, step: int, lease: int) -> None:
        if peer in self.queues:
            with pytest.raises(FrameDamaged):
                self.ledger.arrive(peer, lease, 7, step, -1, now=self.now)
            with pytest.raises(FrameDamaged):
                self.ledger.arrive(peer, self.last[peer], 8, step, -1, now=self.now)
            assert not self.ledger.arrive(peer, 1, 6, step, -1, now=self.now)
            self.old += 1
            assert self.ledger.stale == self.old

    @rule(seconds=st.floats(0, LEASE_SECONDS * 1.5))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @rule(peer=peers)
    def say_idle(self, peer: bytes) -> None:
        if peer in self.queues and not self.queues[peer]:
            self.ledger.idle(peer, self.last[peer], now=self.now)

    @rule()
    def take(self) -> None:
        if self.ledger.steps.has_next:
            self.delivered.append(self.ledger.steps.take())

    @invariant()
    def each_is_delivered_once(self) -> None:
        if hasattr(self, "delivered"):
            assert len(set(self.delivered)) == len(self.delivered)
            assert not set(self.delivered) & self.before
            if self.ordered:
                assert self.delivered == sorted(self.delivered)
            waiting = len(self.ledger.steps._arrived)
            assert waiting <= 3 * self.ahead

    def teardown(self) -> None:
        """All peers make their steps until none is left."""
        if not hasattr(self, "delivered"):
            return
        self.join(A)
        for _ in range(500):
            self.grant()
            for peer in list(self.queues):
                self.send(peer)
                self.say_idle(peer)
            self.take()
            if self.ledger.steps.is_over:
                break
        assert sorted(self.delivered) == sorted(set(range(self.steps)) - self.before)
        assert self.ledger.steps.is_over


TestPeers = Peers.TestCase
TestPeers.settings = settings(deadline=None, max_examples=200, stateful_step_count=60)


def test_a_step_that_arrives_under_an_old_lease_is_not_expected_under_the_new_one() -> None:
    made = ledger(A, B, steps=4)
    ((_, old),) = made.grant(0.0)
    made.expire(LEASE_SECONDS + 1)
    made.leave(B)
    made.arrive(A, old.id, 0, 0, 0, now=LEASE_SECONDS + 1)
    ((_, new),) = made.grant(LEASE_SECONDS + 1)
    assert (new.start, new.stop, made.held(A)) == (1, 4, 3)

    for step in (1, 2):
        made.arrive(A, old.id, 0, step, step, now=LEASE_SECONDS + 1)

    assert made.held(A) == 1


def test_a_pass_of_unknown_length_ends_where_a_peer_reports_its_end() -> None:
    made = ledger(A, steps=None, in_any_order=False)
    ((_, lease),) = made.grant(0.0)
    for step in (0, 1):
        made.arrive(A, lease.id, 0, step, step, now=0.0)
    assert taken(made) == [0, 1]
    assert not made.steps.is_over
    with pytest.raises(FrameDamaged):
        made.end(A, lease.id, 0, 1)

    made.end(A, lease.id, 0, 2)

    assert made.steps.is_over
    assert made.held(A) == 0
    assert granted(made) == []
    made.end(A, lease.id, 0, 2)
    for total in (1, 3):
        with pytest.raises(FrameDamaged):
            made.end(A, lease.id, 0, total)


NOWHERE = Path()


@pytest.mark.slow
@pytest.mark.parametrize("senders", [1, 2, 3])
@pytest.mark.parametrize("name", ["in_parts", "flows_in_parts"])
def test_the_items_are_those_of_local_passes(name: str, senders: int) -> None:
    with wired(lambda: SOURCES[name](NOWHERE), senders=senders) as source:
        found = [list(source) for _ in range(2)]

    assert all(same(*each) for each in zip(found, locally(name, NOWHERE, passes=2), strict=True))


@pytest.mark.torture
def test_a_sender_that_is_killed_leaves_its_parts_to_others() -> None:
    with (
        RemoteSource(ANY_PORT, lease_seconds=2) as source,
        programs(2, "slowly_in_parts", NOWHERE, source.endpoint) as senders,
    ):
        for sender in senders:
            assert line_of(sender) == "ready"
        items = iter(source)
        found = [next(items) for _ in range(20)]
        senders[0].kill()
        found += items
        source.close()

    assert same(found, locally("slowly_in_parts", NOWHERE)[0])


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6), data=st.data())
def test_every_step_comes_once_whichever_senders_join_and_leave_and_wherever_it_is_continued(
    lengths: list[int], data: Any
) -> None:
    parts = len(lengths)
    ledger: Ledger[int] = Ledger(ahead=3, lease_seconds=10)
    ledger.begin(0, Steps(total=None, parts=parts))
    work: dict[bytes, list[Any]] = {}
    names, taken = iter(range(1000)), []
    for _ in range(2000):
        if ledger.steps.is_over:
            break
        action = data.draw(st.sampled_from(["work"] * 8 + ["join", "leave", "continue"]))
        if action == "continue":
            steps, work = Steps[int](start=ledger.steps.due, total=None, parts=parts), {}
            ledger = Ledger(ahead=3, lease_seconds=10)
            ledger.begin(0, steps)
        if not work or (action == "join" and len(work) < 3):
            peer = b"%d" % next(names)
            ledger.join(peer, wants=3, now=0)
            work[peer] = []
        elif action == "leave":
            peer = data.draw(st.sampled_from(sorted(work)))
            ledger.leave(peer)
            del work[peer]
        for peer, lease in ledger.grant(0):
            work[peer] += [(lease.id, step) for step in range(lease.start, lease.stop)]
        busy = [peer for peer in sorted(work) if work[peer]]
        if busy:
            peer = data.draw(st.sampled_from(busy))
            lease_id, step = work[peer].pop(0)
            number, part = divmod(step, parts)
            if number < lengths[part]:
                ledger.arrive(peer, lease_id, 0, step, step, now=0)
            else:
                ledger.end(peer, lease_id, 0, lengths[part] * parts + part)
        while ledger.steps.has_next:
            taken.append(ledger.steps.take())

    assert taken == sorted(n * parts + part for part, length in enumerate(lengths) for n in range(length))
