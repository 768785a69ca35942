"""The leases of the steps of a pass. Pure: without sockets and clocks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from shardprep.loaders.frames.bounds import FrameDamaged

from .sender_window import SenderWindow
from .step_tracker import Steps

AHEAD = 12  # steps of one sender; a Loader draws up to its slots ahead, and must not run out of steps
LEASE_STEPS = 4  # at most; few, so that the batches of one sender do not wait for those of a slow one
MAX_FAILURES = 3  # of senders at one step

T = TypeVar("T")


@dataclass(frozen=True)
class StepLease:
    """The steps ``start`` to ``stop`` - 1 of a pass, for one sender to make."""

    id: int
    pass_number: int
    start: int
    stop: int


class Arrival(Enum):
    """The outcome of a step that arrived."""

    FRESH = "it was missing"
    REPEATED = "it had arrived before"
    STALE = "its pass is over"


class Ledger(Generic[T]):
    """Leases the steps of one pass after the other, at most ``ahead`` of them to each peer.

    No step is leased that is further from the one due than ``ahead`` times the number of peers, so no more
    items than that wait. A peer makes the steps of its leases in order; a step that it skips is leased again.
    So are the steps of a peer that leaves, and of one that holds a lease and sends nothing for
    ``lease_seconds``; it is suspended until it sends something, and a step that still arrives is used where
    it is missing. A peer that the others wait for gets fewer steps at a time (:class:`.SenderWindow`). Where
    steps cannot be made in any order (``in_any_order``), one peer has all leases until it leaves or is
    suspended. The callers pass the time in seconds as ``now``. Not thread-safe.
    """

    def __init__(self, *, ahead: int, lease_seconds: float) -> None:
        self.leases_given_again = 0
        self.steps: Steps[T] = Steps(total=0)
        self._ahead = ahead
        self._lease_seconds = lease_seconds
        self._pass_number = -1
        self.in_any_order = True
        self._next_id = 1
        self._windows: dict[bytes, SenderWindow] = {}
        # of this pass, except those with all steps before ``due``
        self._leases: dict[int, tuple[bytes, StepLease]] = {}
        self._first_id = 1  # of the leases since the last ``begin``
        self._failures: dict[int, list[str]] = {}
        self._delaying_step = -1  # the last step that others were found to wait for

    def begin(self, pass_number: int, steps: Steps[T], *, in_any_order: bool) -> None:
        """Lease the steps of this pass. Leases of another pass become stale."""
        if pass_number != self._pass_number:
            self._leases.clear()
        self._first_id = self._next_id
        self.steps, self._pass_number, self.in_any_order = steps, pass_number, in_any_order
        self._failures.clear()
        self._delaying_step = -1
        for window in self._windows.values():
            window.steps.clear()

    @property
    def peers(self) -> int:
        return len(self._windows)

    def held(self, peer: bytes) -> int:
        """Return the number of steps that are leased to a peer and have not arrived."""
        window = self._windows.get(peer)
        return len(window.steps) if window else 0

    def join(self, peer: bytes, *, wants: int, now: float) -> None:
        """Add a peer, which takes leases of at most ``wants`` steps together."""
        self._windows[peer] = SenderWindow(max(1, min(wants, self._ahead)), now)

    def leave(self, peer: bytes) -> None:
        """Remove a peer, and lease its steps again."""
        if window := self._windows.pop(peer, None):
            self.steps.release(peer)
            self._return_steps(window)

    def grant(self, now: float) -> Iterator[tuple[bytes, StepLease]]:
        """Yield new leases for all peers with room, a few steps to each in turn."""
        self._forget_old_leases()
        self._throttle()
        granted = True
        while granted:
            granted = False
            for peer, window in self._active_windows():
                if lease := self._lease_for(peer, window, now):
                    granted = True
                    self._move_to_end(peer)
                    yield peer, lease

    def arrive(
        self, peer: bytes, lease_id: int, pass_number: int, step: int, item: T, *, now: float
    ) -> Arrival:
        """Add a step that arrived. Raises FrameDamaged where it was never leased to this peer."""
        if self._is_of_before(lease_id, pass_number):
            return Arrival.STALE
        self._check(peer, lease_id, pass_number, step)
        is_fresh = self.steps.arrive(step, item)
        self._failures.pop(step, None)
        self._mark_sent(peer, now, until=(lease_id, step))
        return Arrival.FRESH if is_fresh else Arrival.REPEATED

    def idle(self, peer: bytes, lease_id: int, *, now: float) -> None:
        """Note that a peer has nothing more to send of its leases up to this one. Raises FrameDamaged."""
        if not 0 <= lease_id < self._next_id:
            raise FrameDamaged("a sender refers to a lease that does not exist")
        self._mark_sent(peer, now, until=(lease_id, sys.maxsize))

    def end(self, peer: bytes, lease_id: int, pass_number: int, total: int) -> None:
        """Note that the pass, or the part of step ``total``, ends before it, as a peer found.

        Raises FrameDamaged.
        """
        if self._is_of_before(lease_id, pass_number):
            return
        owner, lease = self._leases.get(lease_id, (b"", None))
        if lease is None and 0 < lease_id < self._next_id:
            return  # forgotten: all its steps are before ``due``
        is_leased = lease is not None and owner == peer and pass_number == self._pass_number
        if not is_leased or not self.steps.end_at(total):
            raise FrameDamaged(f"a sender ends pass {pass_number} after {total} steps, which is not valid")
        for window in self._windows.values():
            window.steps = deque(held for held in window.steps if self.steps.is_missing(held[1]))

    def fail(self, peer: bytes, lease_id: int, pass_number: int, step: int, text: str) -> None:
        """Note that a peer failed at a step, and remove it."""
        if not self._is_of_before(lease_id, pass_number):
            self._check(peer, lease_id, pass_number, step)
            self._failures.setdefault(step, []).append(text)
        self.leave(peer)

    @property
    def failure(self) -> str | None:
        """The error of the step due, if MAX_FAILURES peers or all peers failed at it; else None."""
        step = min(self._failures, default=None)
        if step is None or self.steps.has_next:
            return None
        texts = self._failures[step]
        is_final = not self._windows or (step == self.steps.due and len(texts) >= MAX_FAILURES)
        return texts[0] if is_final else None

    def expire(self, now: float) -> int:
        """Suspend peers with expired leases where another peer can take these; return how many."""
        late = 0
        for peer, window in list(self._windows.items()):
            is_late = window.steps and now - window.last_arrival > self._lease_seconds
            others = [other for other in self._windows.values() if other is not window]
            if is_late and any(not other.is_suspended for other in others):
                self._suspend(peer, window)
                late += 1
        return late

    def _active_windows(self) -> list[tuple[bytes, SenderWindow]]:
        active = [(peer, window) for peer, window in self._windows.items() if not window.is_suspended]
        return active if self.in_any_order else active[:1]

    def _move_to_end(self, peer: bytes) -> None:
        if self.in_any_order:
            self._windows[peer] = self._windows.pop(peer)

    def _lease_for(self, peer: bytes, window: SenderWindow, now: float) -> StepLease | None:
        most = min(LEASE_STEPS, window.room)
        steps = self.steps.assign(most, below=self._end_of_window, peer=peer)
        if not steps:
            return None
        lease = StepLease(self._next_id, self._pass_number, steps.start, steps.stop)
        self._next_id += 1
        self._leases[lease.id] = peer, lease
        if not window.steps:
            window.last_arrival = now
        window.steps.extend((lease.id, step) for step in steps)
        return lease

    @property
    def _end_of_window(self) -> int:
        return self.steps.due + self._ahead * len(self._windows)

    def _throttle(self) -> None:
        """Shrink the window of the peer that holds the step due, once per step, if others wait for it."""
        due = self.steps.due
        if due == self._delaying_step or self.steps.has_next:
            return
        if not self.steps.goes_beyond(self._end_of_window):
            return
        active = self._active_windows()
        slow = next(((peer, window) for peer, window in active if window.holds(due)), None)
        if slow and any(window.is_nearly_empty for _, window in active if window is not slow[1]):
            self._delaying_step = due
            self._slow_down(*slow)

    def _slow_down(self, peer: bytes, window: SenderWindow) -> None:
        """Shrink a window. A peer that still delays the others with a window of one step is suspended."""
        if window.has_begun and window.size == 1:
            self._suspend(peer, window)
        self.steps.release(peer, one=True)
        window.shrink()

    def _suspend(self, peer: bytes, window: SenderWindow) -> None:
        """Lease the steps of a peer to others, and nothing to it until it sends something."""
        self.steps.release(peer)
        self._return_steps(window)
        window.is_suspended = True
        self._windows[peer] = self._windows.pop(peer)  # the last in turn

    def _is_of_before(self, lease_id: int, pass_number: int) -> bool:
        """Return whether a lease is from before the pass was begun, perhaps again, and cannot be used now."""
        is_known = lease_id in self._leases and pass_number == self._pass_number
        return pass_number < self._pass_number or (0 < lease_id < self._first_id and not is_known)

    def _check(self, peer: bytes, lease_id: int, pass_number: int, step: int) -> None:
        owner, lease = self._leases.get(lease_id, (peer, None))
        if lease is None:  # forgotten: all its steps are before ``due``
            known = 0 < lease_id < self._next_id and 0 <= step < self.steps.due
        else:
            known = owner == peer and lease.start <= step < lease.stop
        if not known or pass_number != self._pass_number:
            raise FrameDamaged(
                f"a sender sends step {step} of pass {pass_number}, which was not leased to it"
            )

    def _mark_sent(self, peer: bytes, now: float, *, until: tuple[int, int]) -> None:
        """Remove the steps up to ``until`` from a window. Those that have not arrived are leased again."""
        window = self._windows[peer]
        window.last_arrival, window.is_suspended = now, False
        done = [held for held in window.steps if held <= until]
        window.steps = deque(held for held in window.steps if held > until and self.steps.is_missing(held[1]))
        window.grow(len(done))
        self._lease_again(done)

    def _return_steps(self, window: SenderWindow) -> None:
        held, window.steps = window.steps, deque()
        self._lease_again(held)

    def _lease_again(self, held: Iterable[tuple[int, int]]) -> None:
        missing = [(lease, step) for lease, step in held if self.steps.is_missing(step)]
        self.leases_given_again += len({lease for lease, _ in missing})
        self.steps.unassign(step for _, step in missing)

    def _forget_old_leases(self) -> None:
        while self._leases:
            oldest = next(iter(self._leases))
            if self._leases[oldest][1].stop > self.steps.due:
                return
            del self._leases[oldest]
