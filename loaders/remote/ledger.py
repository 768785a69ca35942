"""Who makes which steps of a pass: leases to the peers that come and go. Pure, without sockets or clocks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from ..frames import FrameDamaged
from .hand import Hand
from .steps import Steps

AHEAD = 12  # steps of one sender: a Loader draws up to its slots ahead of what it delivers, and is never to run dry
SHARE = 4  # steps of a lease: few, so that what one sender makes does not wait for what another one does not
STRIKES = 3  # senders that may fail at a step

T = TypeVar("T")


@dataclass(frozen=True)
class Lease:
    """The steps ``start`` to ``stop`` - 1 of a pass, for one sender to make."""

    id: int
    pass_number: int
    start: int
    stop: int


class Arrival(Enum):
    """What became of a step that came."""

    FRESH = "it was missing"
    REPEATED = "it had come before"
    STALE = "its pass is over"


class Ledger(Generic[T]):
    """Leases the steps of one pass after the other, at most ``ahead`` of them to each peer.

    No step is leased that is further from the one due than all peers' ``ahead`` together, so that no more than that
    ever wait. A peer makes the steps of its leases in their order: one that it passed over is lost, and leased
    again. So are those of a peer that leaves, and of one that for ``lease_seconds`` holds a lease and sends
    nothing; what it sends after all is welcome where it is still missing. Who makes others run dry gets fewer at a
    time (:class:`.Hand`), so that all work at their own pace. Where steps cannot be made in any order
    (``in_any_order``) one peer has all leases, until it leaves or falls asleep. Time is what the callers say it is.
    Not thread-safe.
    """

    def __init__(self, *, ahead: int, lease_seconds: float) -> None:
        self.leases_given_again = 0
        self.steps: Steps[T] = Steps(total=0)
        self._ahead = ahead
        self._lease_seconds = lease_seconds
        self._pass_number = -1
        self.in_any_order = True
        self._next_id = 1
        self._hands: dict[bytes, Hand] = {}
        # of this pass, but for those that are behind ``due``
        self._leases: dict[int, tuple[bytes, Lease]] = {}
        self._first_id = 1  # of the leases since the last ``begin``
        self._failures: dict[int, list[str]] = {}
        self._waited_for = -1  # the step that somebody was found to hold others up with

    def begin(self, pass_number: int, steps: Steps[T], *, in_any_order: bool) -> None:
        """Lease this pass; what is at hand of another one is not wanted any more, of the same one it is."""
        if pass_number != self._pass_number:
            self._leases.clear()
        self._first_id = self._next_id
        self.steps, self._pass_number, self.in_any_order = steps, pass_number, in_any_order
        self._failures.clear()
        self._waited_for = -1
        for hand in self._hands.values():
            hand.steps.clear()

    @property
    def peers(self) -> int:
        return len(self._hands)

    def held(self, peer: bytes) -> int:
        """How many steps it has still to send."""
        hand = self._hands.get(peer)
        return len(hand.steps) if hand else 0

    def join(self, peer: bytes, *, wants: int, now: float) -> None:
        """It may be given leases of at most ``wants`` steps together."""
        self._hands[peer] = Hand(max(1, min(wants, self._ahead)), now)

    def leave(self, peer: bytes) -> None:
        """It will send nothing more."""
        if hand := self._hands.pop(peer, None):
            self._lose(hand)

    def grant(self, now: float) -> Iterator[tuple[bytes, Lease]]:
        """New leases for who has room, a few steps in turn."""
        self._forget_old_leases()
        self._hurry()
        granted = True
        while granted:
            granted = False
            for peer, hand in self._who_may_have_leases():
                if lease := self._lease_for(peer, hand, now):
                    granted = True
                    self._have_others_first(peer)
                    yield peer, lease

    def arrive(
        self, peer: bytes, lease_id: int, pass_number: int, step: int, item: T, *, now: float
    ) -> Arrival:
        """A step came. Raises FrameDamaged where this peer was never asked for it."""
        if self._is_of_before(lease_id, pass_number):
            return Arrival.STALE
        self._check(peer, lease_id, pass_number, step)
        is_fresh = self.steps.arrive(step, item)
        self._failures.pop(step, None)
        self._hear(peer, now, until=(lease_id, step))
        return Arrival.FRESH if is_fresh else Arrival.REPEATED

    def idle(self, peer: bytes, lease_id: int, *, now: float) -> None:
        """The peer has done, or never had, whatever leases it was given up to this one, and asks for more."""
        if not 0 <= lease_id < self._next_id:
            raise FrameDamaged("a sender has done a lease that there never was")
        self._hear(peer, now, until=(lease_id, sys.maxsize))

    def end(self, peer: bytes, lease_id: int, pass_number: int, total: int) -> None:
        """The peer, asked for more, found that the pass has so many steps. Raises FrameDamaged where it cannot have."""
        if self._is_of_before(lease_id, pass_number):
            return
        owner, lease = self._leases.get(lease_id, (b"", None))
        is_asked = lease is not None and owner == peer and pass_number == self._pass_number
        if not is_asked or not self.steps.end_at(total):
            raise FrameDamaged(f"a sender ends pass {pass_number} after {total} steps, which it cannot")
        for hand in self._hands.values():
            hand.steps = deque(held for held in hand.steps if held[1] < total)

    def fail(self, peer: bytes, lease_id: int, pass_number: int, step: int, text: str) -> None:
        """The peer could not make a step, and makes no more."""
        if not self._is_of_before(lease_id, pass_number):
            self._check(peer, lease_id, pass_number, step)
            self._failures.setdefault(step, []).append(text)
        self.leave(peer)

    @property
    def failure(self) -> str | None:
        """What to tell the consumer: a step that is due and that enough peers, or all there were, failed at."""
        step = min(self._failures, default=None)
        if step is None or self.steps.has_next:
            return None
        texts = self._failures[step]
        return texts[0] if not self._hands or (step == self.steps.due and len(texts) >= STRIKES) else None

    def expire(self, now: float) -> int:
        """Take the leases of who hold some and were not heard for too long, where there are others who could take
        them; how many peers these are."""
        late = 0
        for peer, hand in list(self._hands.items()):
            is_late = hand.steps and now - hand.last_heard > self._lease_seconds
            if is_late and any(not other.is_asleep for other in self._hands.values() if other is not hand):
                self._put_to_sleep(peer, hand)
                late += 1
        return late

    def _who_may_have_leases(self) -> list[tuple[bytes, Hand]]:
        awake = [(peer, hand) for peer, hand in self._hands.items() if not hand.is_asleep]
        return awake if self.in_any_order else awake[:1]

    def _have_others_first(self, peer: bytes) -> None:
        if self.in_any_order:
            self._hands[peer] = self._hands.pop(peer)

    def _lease_for(self, peer: bytes, hand: Hand, now: float) -> Lease | None:
        steps = self.steps.ask(min(SHARE, hand.room), below=self._end_of_window)
        if not steps:
            return None
        lease = Lease(self._next_id, self._pass_number, steps.start, steps.stop)
        self._next_id += 1
        self._leases[lease.id] = peer, lease
        if not hand.steps:
            hand.last_heard = now
        hand.steps.extend((lease.id, step) for step in steps)
        return lease

    @property
    def _end_of_window(self) -> int:
        return self.steps.due + self._ahead * len(self._hands)

    def _hurry(self) -> None:
        """Give less to who holds the step that is due, once for each, where others may make no more until it comes."""
        due = self.steps.due
        if due == self._waited_for or self.steps.has_next or not self.steps.goes_beyond(self._end_of_window):
            return
        candidates = self._who_may_have_leases()
        slow = next(((peer, hand) for peer, hand in candidates if hand.holds(due)), None)
        if slow and any(hand.is_dry for _, hand in candidates if hand is not slow[1]):
            self._waited_for = due
            self._slow_down(*slow)

    def _slow_down(self, peer: bytes, hand: Hand) -> None:
        """Who takes for one step as long as the others for the whole window only gets in their way."""
        if hand.has_begun and hand.share == 1:
            self._put_to_sleep(peer, hand)
        hand.held_up()

    def _put_to_sleep(self, peer: bytes, hand: Hand) -> None:
        """Until it is heard, others make its steps."""
        self._lose(hand)
        hand.is_asleep = True
        self._hands[peer] = self._hands.pop(peer)  # the last in turn

    def _is_of_before(self, lease_id: int, pass_number: int) -> bool:
        """Whether it was asked for before the pass was begun, perhaps again, and cannot be used now."""
        is_known = lease_id in self._leases and pass_number == self._pass_number
        return pass_number < self._pass_number or (0 < lease_id < self._first_id and not is_known)

    def _check(self, peer: bytes, lease_id: int, pass_number: int, step: int) -> None:
        owner, lease = self._leases.get(lease_id, (peer, None))
        if lease is None:  # forgotten, so that all its steps are behind
            known = 0 < lease_id < self._next_id and 0 <= step < self.steps.due
        else:
            known = owner == peer and lease.start <= step < lease.stop
        if not known or pass_number != self._pass_number:
            raise FrameDamaged(
                f"a sender sends step {step} of pass {pass_number}, which it was not asked for"
            )

    def _hear(self, peer: bytes, now: float, *, until: tuple[int, int]) -> None:
        """The peer works, and what it was to send up to there has come or is lost."""
        hand = self._hands[peer]
        hand.last_heard, hand.is_asleep = now, False
        done = [held for held in hand.steps if held <= until]
        hand.steps = deque(held for held in hand.steps if held > until and self.steps.is_missing(held[1]))
        hand.delivered(len(done))
        self._give_back(done)

    def _lose(self, hand: Hand) -> None:
        held, hand.steps = hand.steps, deque()
        self._give_back(held)

    def _give_back(self, held: Iterable[tuple[int, int]]) -> None:
        missing = [(lease, step) for lease, step in held if self.steps.is_missing(step)]
        self.leases_given_again += len({lease for lease, _ in missing})
        self.steps.give_back(step for _, step in missing)

    def _forget_old_leases(self) -> None:
        while self._leases:
            oldest = next(iter(self._leases))
            if self._leases[oldest][1].stop > self.steps.due:
                return
            del self._leases[oldest]
