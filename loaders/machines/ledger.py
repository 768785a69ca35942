"""Leases of the steps of a pass: which sender makes which step, each exactly once. Pure."""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from shardprep.formats.errors import OperationError
from shardprep.loaders.engine.messages import make_error
from shardprep.loaders.machines.codec import FrameDamaged

T = TypeVar("T")
FIRST_SIZE = 4  # steps; few, as the sender may be slow
SLOW_GROWTH = 16  # steps that must arrive for a window to grow by one, once it has shrunk
AHEAD = 12  # steps per sender; a Loader draws as many steps ahead as it has slots, and must not run out
MAX_LEASE = 1 << 16  # steps
LEASE_STEPS = 4  # at most; few, so that batches of a fast sender do not wait for those of a slow one
MAX_FAILURES = 3  # per step


class SenderWindow:
    """The ``steps`` leased to a sender, in its order, each with the number of its lease.

    The window's size, at most ``wants``, changes as in TCP's congestion control: it grows by one for each
    step that arrives, is halved when other senders wait for this one, and then grows by one for every
    SLOW_GROWTH steps. This needs no clock, and halves no window while all senders wait for the consumer.
    """

    def __init__(self, wants: int, last_arrival: float) -> None:
        self.last_arrival = last_arrival
        self.steps: deque[tuple[int, int]] = deque()
        self.is_suspended = self.has_begun = False
        self.size = min(wants, FIRST_SIZE)
        self._wants = wants
        self._steps_per_growth, self._in_time = 1, 0

    def shrink(self) -> None:
        """Halve the window. Does nothing before the first step: the workers may still be starting."""
        if not self.has_begun:
            return
        self.size = max(1, self.size // 2)
        self._steps_per_growth, self._in_time = SLOW_GROWTH, 0

    def grow(self, steps: int) -> None:
        """Enlarge the window after ``steps`` steps have arrived or were lost."""
        more, self._in_time = divmod(self._in_time + steps, self._steps_per_growth)
        self.size = min(self._wants, self.size + more)


@dataclass
class Part:
    """A part of a pass: its first step never assigned, and a heap of earlier steps ``to_reassign``."""

    first: int
    owner: bytes | None = None
    to_reassign: list[int] = field(default_factory=list)
    end: int | None = None  # the step after its last one, if known


class Steps(Generic[T]):
    """The steps ``start`` to ``total`` - 1 of a pass, except those ``taken``; an unknown total is None.

    Items are taken in step order or, unless ``ordered``, in order of arrival; each once, however often it
    arrives. Step n belongs to part n % ``parts``. All peers share a single part. Several parts end one by
    one, and each has one owner: a peer gets steps of its own parts, then of a part without an owner, then of
    one taken from the peer that owns the most, if that is at least two more than its own. Not thread-safe.
    """

    def __init__(
        self,
        *,
        start: int = 0,
        total: int | None,
        taken: Collection[int] = (),
        ordered: bool = True,
        parts: int = 1,
    ) -> None:
        self.due = start
        self.total = total
        self.ordered = ordered
        self.parts = parts
        self._taken = set(taken)  # after ``due``
        self._arrived: dict[int, T] = {}
        self._parts = [Part(start + (part - start) % parts) for part in range(parts)]
        self._skip_taken()

    def divide(self, parts: int) -> Steps[T]:
        """Return the steps still to be taken, divided into ``parts`` parts and unassigned."""
        if parts == len(self._parts):
            return self
        return Steps(start=self.due, total=None, taken=self._taken, ordered=self.ordered, parts=parts)

    @property
    def is_over(self) -> bool:
        return self.total is not None and self.due >= self.total

    @property
    def taken(self) -> list[int]:
        """The steps after ``due`` that have been taken."""
        return sorted(self._taken)

    @property
    def has_next(self) -> bool:
        return self.due in self._arrived if self.ordered else bool(self._arrived)

    def is_missing(self, step: int) -> bool:
        """Return whether a step has not arrived, and belongs to the pass as far as known."""
        has_arrived = step in self._arrived or step in self._taken
        return self.due <= step and not has_arrived and not self._is_beyond(step)

    def assign(self, most: int, *, below: int, peer: bytes) -> range:
        """Assign to ``peer`` the first consecutive steps that are missing and unassigned; perhaps none."""
        part = self._part_for(peer, below) if most > 0 else None
        if part is None:
            return range(0)
        if len(self._parts) > 1:
            part.owner, most = peer, 1
        first = stop = self._next_step(part)
        while stop < min(first + most, below) and self._next_step(part) == stop and self.is_missing(stop):
            while part.to_reassign and part.to_reassign[0] == stop:
                heapq.heappop(part.to_reassign)
            part.first = max(part.first, stop + len(self._parts))
            stop += 1
        return range(first, stop)

    def next_is_beyond(self, step: int) -> bool:
        """Return whether there are steps to assign, all from ``step`` on."""
        return min((self._next_step(part) for part in self._open_parts()), default=-1) >= step

    def unassign(self, steps: Iterable[int]) -> None:
        """Unassign steps; the missing ones are assigned next."""
        for step in filter(self.is_missing, steps):
            heapq.heappush(self._parts[step % len(self._parts)].to_reassign, step)

    def release(self, peer: bytes, *, only_one: bool = False) -> None:
        """Give up the peer's ownership of its parts, or of ``only_one`` of several that have steps to assign.

        A part that has ended is given up, too: another peer's steps of it may be assigned again.
        """
        own = [part for part in self._parts if part.owner == peer]
        for part in self._open_parts(peer)[1:2] if only_one else own:
            part.owner = None

    def add(self, step: int, item: T) -> bool:
        """Add an arrived step; return whether it was missing."""
        if not self.is_missing(step):
            return False
        self._arrived[step] = item
        return True

    def take(self) -> T:
        """Take the next item. Raises KeyError unless :attr:`has_next`."""
        step = self.due if self.ordered else next(iter(self._arrived), self.due)
        item = self._arrived.pop(step)
        self._taken.add(step)
        self._skip_taken()
        return item

    def end_at(self, total: int) -> bool:
        """Set the end of the part that ``total`` would belong to. Return False if it cannot be right."""
        part, parts = self._parts[total % len(self._parts)], len(self._parts)
        if (known_end := self.total if parts == 1 else part.end) is not None:
            return known_end == total
        known = [step for step in (*self._arrived, *self._taken) if (step - total) % parts == 0]
        if parts == 1:
            known.append(self.due - 1)  # one of several parts may have ended earlier, if a pass is continued
        if total <= max(known, default=-1):
            return False
        part.end = total
        ends = [part.end for part in self._parts if part.end is not None]
        if len(ends) == parts:
            self.total = max(max(ends) - parts + 1, self.due)
        self._skip_taken()
        return True

    def _part_for(self, peer: bytes, below: int) -> Part | None:
        ready = [part for part in self._open_parts() if self._next_step(part) < below]
        choice = [part for part in ready if part.owner == peer] or [p for p in ready if p.owner is None]
        if not choice and ready:
            owned = Counter(part.owner for part in self._open_parts())
            most = max({part.owner for part in ready}, key=lambda owner: owned[owner])
            if owned[most] >= owned[peer] + 2:
                choice = [part for part in ready if part.owner == most][-1:]
        return min(choice, key=self._next_step, default=None)

    def _open_parts(self, *owners: bytes) -> list[Part]:
        """Return the parts that have steps to assign: all, or those with one of these owners."""
        owned = [part for part in self._parts if not owners or part.owner in owners]
        return [part for part in owned if not self._is_beyond(self._next_step(part))]

    def _next_step(self, part: Part) -> int:
        """Return the part's first step that is missing and unassigned; perhaps beyond its end."""
        while part.to_reassign and not self.is_missing(part.to_reassign[0]):
            heapq.heappop(part.to_reassign)
        while part.first < self.due or part.first in self._arrived or part.first in self._taken:
            part.first += len(self._parts)
        return part.to_reassign[0] if part.to_reassign else part.first

    def _is_beyond(self, step: int) -> bool:
        end = self._parts[step % len(self._parts)].end
        return (end is not None and step >= end) or (self.total is not None and step >= self.total)

    def _skip_taken(self) -> None:
        while not self.is_over and (self.due in self._taken or self._is_beyond(self.due)):
            self._taken.discard(self.due)
            self.due += 1


@dataclass(frozen=True)
class StepLease:
    """The lease of steps ``start`` to ``stop`` - 1 of a pass to one sender."""

    id: int
    pass_number: int
    start: int
    stop: int


class StepRef(NamedTuple):
    """A sender's reference to a step, with the receiver's session and the lease."""

    session: int
    lease: int
    pass_number: int
    step: int


class SenderFailed(OperationError):
    """A sender reported an error, disconnected, or lost a batch before the end of its epoch."""


class Ledger(Generic[T]):
    """Leases the steps of one pass after the other, at most ``ahead`` of them to each peer.

    No leased step is further from the one due than ``ahead`` times the number of peers. A peer makes its
    leased steps in order. Steps are leased again if the peer skips them, leaves, or sends nothing for
    ``lease_seconds``. In the last case it is suspended until it sends something; its late steps are used if
    they are still missing. A peer that others wait for gets fewer steps at a time (:class:`.SenderWindow`).
    Unless steps can be made ``in_any_order``, or belong to several parts, one peer gets all leases. ``now``
    is the time in seconds. Not thread-safe.
    """

    shares_steps = True  # every peer makes the same batches

    def __init__(self, *, ahead: int, lease_seconds: float) -> None:
        self.leases_given_again = self.repeated = self.stale = 0  # the last two count arrived steps
        self.steps: Steps[T] = Steps(total=0)
        self._ahead = ahead
        self._lease_seconds = lease_seconds
        self.pass_number = -1
        self.in_any_order = True
        self._next_id = 1
        self._windows: OrderedDict[bytes, SenderWindow] = OrderedDict()  # in turn
        self._end = 0  # the step after the last one that was leased since the last ``begin``
        self._failures: dict[int, list[str]] = {}
        self._delaying_step = -1  # the last step that made others wait

    def begin(self, pass_number: int, steps: Steps[T]) -> None:
        """Lease the steps of this pass. Those of another pass become stale."""
        self.steps, self.pass_number, self._end = steps, pass_number, steps.due
        self._failures.clear()
        self._delaying_step = -1
        for window in self._windows.values():
            window.steps.clear()

    def leased_count(self, peer: bytes) -> int:
        """Return the number of steps that are leased to a peer and have not arrived. Thread-safe."""
        window = self._windows.get(peer)
        return len(window.steps) if window else 0

    @property
    def waits_for(self) -> str:
        """What this waits for besides batches, "" if nothing."""
        return "" if self._windows else "no sender is connected; waiting for one"

    def add_peer(self, peer: bytes, *, wants: int, now: float, name: str = "") -> None:
        """Add a peer that takes at most ``wants`` steps at a time."""
        self._windows[peer] = SenderWindow(max(1, min(wants, self._ahead)), now)

    def remove_peer(self, peer: bytes, reason: str = "") -> None:
        """Remove a peer, and lease its steps again."""
        if window := self._windows.pop(peer, None):
            self._return_steps(peer, window)

    def grant(self, now: float) -> Iterator[tuple[bytes, StepLease]]:
        """Yield new leases for all peers with room, a few steps for each in turn."""
        self._throttle()
        granted = True
        while granted:
            granted = False
            for peer, window in self._active_windows():
                most = min(LEASE_STEPS, window.size - len(window.steps))
                if not (steps := self.steps.assign(most, below=self._end_of_window, peer=peer)):
                    continue
                lease = StepLease(self._next_id, self.pass_number, steps.start, steps.stop)
                self._next_id += 1
                self._end = max(self._end, steps.stop)
                if not window.steps:
                    window.last_arrival = now
                window.steps.extend((lease.id, step) for step in steps)
                granted = True
                if self._takes_turns:
                    self._windows.move_to_end(peer)
                yield peer, lease

    def accept(self, peer: bytes, ref: StepRef, item: T, *, now: float) -> bool:
        """Add an arrived step; return whether it was missing: others count as ``repeated`` or ``stale``."""
        window = self._windows[peer]
        window.is_suspended, window.has_begun = False, True
        if not self._was_leased(ref):
            self.stale += 1
            return False
        is_fresh = self.steps.add(ref.step, item)
        self.repeated += not is_fresh
        self._failures.pop(ref.step, None)
        window.last_arrival = now
        self._mark_sent(peer, until=(ref.lease, ref.step))
        return is_fresh

    def record_idle(self, peer: bytes, lease_id: int, *, now: float) -> None:
        """Record that a peer has sent all it can of its leases up to this one. An old later one is lost."""
        is_lost = now - self._windows[peer].last_arrival > self._lease_seconds
        self._mark_sent(peer, until=(sys.maxsize if is_lost else lease_id, sys.maxsize))

    def record_end(self, peer: bytes, end: StepRef) -> bool:
        """Record a peer's report that the pass, or the part of this step, ends before the step.

        Return whether the peer is done. Raises FrameDamaged.
        """
        if self._was_leased(end):
            if not self.steps.end_at(end.step):
                issue = f"a sender ended pass {end.pass_number} after {end.step} steps, which is not valid"
                raise FrameDamaged(issue)
            for window in self._windows.values():
                window.steps = deque(pair for pair in window.steps if self.steps.is_missing(pair[1]))
        return False

    def record_failure(self, peer: bytes, ref: StepRef, text: str) -> None:
        """Record that a peer failed at a step, and remove the peer."""
        if self._was_leased(ref) and self.steps.is_missing(ref.step):
            self._failures.setdefault(ref.step, []).append(text)
        self.remove_peer(peer)

    @property
    def failure(self) -> SenderFailed | None:
        """The error of the step due, if MAX_FAILURES peers or all of them failed at it, else None."""
        step = min(self._failures, default=None)
        if step is None or self.steps.has_next:
            return None
        texts = self._failures[step]
        is_final = not self._windows or (step == self.steps.due and len(texts) >= MAX_FAILURES)
        return make_error(SenderFailed, "a step of this pass cannot be made", texts[0]) if is_final else None

    def expire(self, now: float) -> None:
        """Suspend peers with expired leases if another peer can take over."""
        for peer, window in list(self._windows.items()):
            is_late = window.steps and now - window.last_arrival > self._lease_seconds
            if is_late and any(not w.is_suspended for w in self._windows.values() if w is not window):
                self._suspend(peer, window)

    def _active_windows(self) -> list[tuple[bytes, SenderWindow]]:
        active = [(peer, window) for peer, window in self._windows.items() if not window.is_suspended]
        return active if self._takes_turns else active[:1]

    @property
    def _takes_turns(self) -> bool:
        return self.in_any_order or self.steps.parts > 1

    @property
    def _end_of_window(self) -> int:
        return self.steps.due + self._ahead * len(self._windows)

    def _throttle(self) -> None:
        """Shrink the window of the peer that holds the step due, once per step, if others wait for it.

        Suspend the peer if its window already has only one step, or if it has sent none, as while it starts.
        """
        due = self.steps.due
        is_known = due == self._delaying_step or self.steps.has_next
        if is_known or not self.steps.next_is_beyond(self._end_of_window):
            return
        windows = dict(self._active_windows())
        peer = next((p for p, w in windows.items() if any(step == due for _, step in w.steps)), None)
        soon_idle = {p for p, w in windows.items() if len(w.steps) <= w.size // 4}
        if peer is None or not soon_idle - {peer}:
            return
        self._delaying_step, window = due, windows[peer]
        if self.in_any_order and not window.has_begun:
            window.size = 1
        if window.size == 1 and (self.in_any_order or window.has_begun):
            self._suspend(peer, window)
        self.steps.release(peer, only_one=True)
        window.shrink()

    def _suspend(self, peer: bytes, window: SenderWindow) -> None:
        """Lease the steps of a peer to others, and none to it until it sends something."""
        self._return_steps(peer, window)
        window.is_suspended = True
        self._windows.move_to_end(peer)

    def _was_leased(self, ref: StepRef) -> bool:
        return ref.pass_number == self.pass_number and 0 <= ref.step < self._end

    def _mark_sent(self, peer: bytes, *, until: tuple[int, int]) -> None:
        """Remove the steps up to ``until`` from a window, and lease those that are missing again."""
        window = self._windows[peer]
        window.is_suspended = False
        done = [pair for pair in window.steps if pair <= until]
        window.steps = deque(pair for pair in window.steps if pair > until and self.steps.is_missing(pair[1]))
        window.grow(len(done))
        self._lease_again(done)

    def _return_steps(self, peer: bytes, window: SenderWindow) -> None:
        self.steps.release(peer)
        self._lease_again(window.steps)
        window.steps.clear()

    def _lease_again(self, leased: Iterable[tuple[int, int]]) -> None:
        missing = [(lease, step) for lease, step in leased if self.steps.is_missing(step)]
        self.leases_given_again += len({lease for lease, _ in missing})
        self.steps.unassign(step for _, step in missing)


@dataclass
class Share:
    """The batches that a sender has of its own: how many were leased to it, and how many have arrived."""

    name: str
    leased: int = 0
    arrived: int = 0


class ShareLedger(Ledger[T]):
    """Leases to each of ``senders`` peers the batches of its own, which no other peer can make.

    At most ``ahead`` of each are leased, the next ones once a sixteenth of that is free. Each name takes part
    once in a pass; further peers wait for the next one. Batches are taken in order of arrival.
    """

    shares_steps = False

    def __init__(self, *, senders: int, ahead: int) -> None:
        super().__init__(ahead=min(ahead, MAX_LEASE), lease_seconds=math.inf)
        self._senders = senders
        self._names: dict[bytes, str] = {}  # of the peers
        self.open: dict[bytes, Share] = {}  # peers that take part in this pass, and have not ended it
        self._ended: set[str] = set()  # names
        self._arrived = 0  # batches
        self._failure: SenderFailed | None = None

    def begin(self, pass_number: int, steps: Steps[T]) -> None:
        super().begin(pass_number, steps)
        self._ended.clear()
        self._arrived, self._failure = 0, None

    @property
    def waits_for(self) -> str:
        joined = len(self.open) + len(self._ended)
        if joined == self._senders:
            return ""
        return f"{joined} of {self._senders} senders have joined this epoch (each name counts once); waiting for more"

    def add_peer(self, peer: bytes, *, wants: int, now: float, name: str = "") -> None:
        self._names[peer] = name

    def remove_peer(self, peer: bytes, reason: str = "") -> None:
        """Remove a peer. The pass fails if the peer gives a reason, or if a batch of it has arrived."""
        self._names.pop(peer, None)
        if (share := self.open.pop(peer, None)) is None or share.name in self._ended:
            return
        if reason:
            self._failure = self._failure or make_error(SenderFailed, f"sender {share.name} failed", reason)
        elif share.arrived:
            self._fail(
                f"sender {share.name} disconnected after {share.arrived} batches, before the end of its epoch; "
                "iterate again, with a sender that sends its epoch from the beginning"
            )

    def grant(self, now: float) -> Iterator[tuple[bytes, StepLease]]:
        names = {share.name for share in self.open.values()} | self._ended
        for peer, name in self._names.items():
            if name not in names and len(names) < self._senders and not self._failure:
                self.open[peer] = Share(name)
                names.add(name)
        for peer, share in self.open.items():
            stop = share.arrived + self._ahead
            if stop - share.leased >= max(1, self._ahead // 16) and not self._failure:
                yield peer, StepLease(0, self.pass_number, share.leased, stop)  # its number is not used
                share.leased = stop

    def accept(self, peer: bytes, ref: StepRef, item: T, *, now: float) -> bool:
        share = self._share_of(peer, ref)
        if not share.arrived <= ref.step < share.leased:
            raise FrameDamaged("a batch was not leased, or arrived twice")
        if self._failure or not self._is_complete(share, ref.step):
            return False
        share.arrived += 1
        self._arrived += 1
        return self.steps.add(self._arrived - 1, item)

    def record_idle(self, peer: bytes, lease_id: int, *, now: float) -> None:
        """Do nothing: a batch that was lost is noticed when the next one, or the end, arrives."""

    def record_end(self, peer: bytes, end: StepRef) -> bool:
        share = self._share_of(peer, end)
        if not self._is_complete(share, end.step):
            return False
        self._ended.add(share.name)
        if len(self._ended) == self._senders:
            self.steps.end_at(self._arrived)
        return True

    def record_failure(self, peer: bytes, ref: StepRef, text: str) -> None:
        self.remove_peer(peer, text)

    @property
    def failure(self) -> SenderFailed | None:
        return self._failure

    def _share_of(self, peer: bytes, ref: StepRef) -> Share:
        if peer not in self.open or ref.pass_number != self.pass_number:
            raise FrameDamaged("a sender refers to a pass that it does not take part in")
        return self.open[peer]

    def _is_complete(self, share: Share, sent: int) -> bool:
        """Return whether all that a peer has sent arrived. If not, the pass fails."""
        if share.arrived != sent:
            self._fail(
                f"sender {share.name} has sent {sent} batches, but {share.arrived} arrived; the receiver's "
                "rejected counts the damaged ones"
            )
        return share.arrived == sent

    def _fail(self, text: str) -> None:
        self._failure = self._failure or SenderFailed(text)
