"""The thread that carries a source's batches into a queue or stage, one pass after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from ...formats.errors import UsageError
from ..passes import Passes, end
from .failures import Failure, original_of
from .occupancy import Occupancy
from .sink import Leaves, PassEnded, Sink, SinkClosed, Status

PATIENCE = 5.0  # seconds that a closing input gives its source to come back with a batch
LOOK_AGAIN = 0.5  # seconds after which a waiting thread looks anew, lest a lost notice hang it
UNBEGUN = object()  # the state of a pass that the thread has not yet begun


class Feeder:
    """Puts the passes of a source into a sink, each ended by END or ERROR, each begun when it is asked for.

    One consumer takes, in Python (:meth:`take`) or unseen in a graph, which calls :meth:`ended`. A pass
    that is left early is emptied out of the sink before the next begins.
    """

    def __init__(
        self,
        passes: Passes,
        sink: Sink,
        leaves_of: Callable[[Any], Leaves],
        *,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.passes = passes
        self.occupancy = Occupancy()
        self.unseen = False  # a graph takes; it cannot ask for the next pass, so that is begun at once
        self._sink = sink
        self._leaves_of = leaves_of
        self._on_close = on_close  # what may wake a source that is waited for
        self._changed = threading.Condition()
        self._ticket = 0
        self._open = False  # the consumer has not yet seen the end of the pass
        self._fresh = False  # nothing was taken of it
        self._running = False  # the thread has not yet put the end of the pass, or left it
        self._leaving = False
        self._again = False  # a graph has seen the end before the thread was through, and wants the next pass
        self._closed = False
        self._within = False  # a pass that was begun, and left perhaps, but not seen to its end
        self._state: Any = None  # the source's after the batch that was taken last
        self._states: deque[Any] = deque()  # and after those that wait in the sink
        self._failures: deque[Failure] = deque(maxlen=2)  # in a graph the next pass may fail meanwhile
        self._thread: threading.Thread | None = None

    def begin(self) -> int:
        """Ask for a new pass and get the ticket to it; one that nothing was taken of is as good as new."""
        with self._changed:
            self.check_open()
            self._fresh = self._fresh and not self.unseen
            if not self._fresh:
                self.leave(self._ticket)
                self._await(lambda: self._fresh or not self._running)
            if not self._fresh:
                self._ask()
            self._ticket += 1
            return self._ticket

    def take(self, ticket: int) -> Leaves | None:
        """The next batch of that pass, None at its end; raises what the source raised, as itself.

        UsageError when the input is closed meanwhile, or another pass was begun.
        """
        with self._changed:
            waited = self._await_element(ticket)
            self._fresh = False
            status, leaves = self._sink.take()
            if status == Status.BATCH:
                self.occupancy.taken(waited=waited)
                self._state = self._states.popleft() if self._states else None
                return leaves
            self._finish()
            if status == Status.ERROR:  # handed over, as what it was raised through would keep this input
                raise self._failures.pop().hand_over() or RuntimeError
            return None

    def leave(self, ticket: int) -> None:
        """The consumer wants no more of that pass: empty the sink, so that the thread can end it."""
        with self._changed:
            if self._open and ticket == self._ticket and not self._closed:
                self._leaving = True
                self._open = self._fresh = False
                self._sink.empty()
                self._changed.notify_all()

    def take_unseen(self) -> None:
        """From now on a graph takes."""
        with self._changed:
            self.check_open()
            self.unseen = True
            if not self._open:
                self._await(lambda: self._open or not self._running)
            if not self._open:
                self._ask()

    def ended(self, status: int) -> None:
        """Called by a graph that took END or ERROR: tells it so in the way it understands, by raising."""
        with self._changed:
            failure = self._failures[-1] if status == Status.ERROR else None
            self._finish()
        if failure:
            raise failure.stand_in()
        raise StopIteration  # TensorFlow turns it into OutOfRangeError

    def state(self) -> Any:
        """The source's state as of the batch that was taken last."""
        self._check_seen()
        with self._changed:
            if self._within and self._state is UNBEGUN:
                self._await(lambda: self._state is not UNBEGUN or not self._running)
            if self._within and self._state is not UNBEGUN:
                return self._state
            self._await(lambda: not self._running)
            return self.passes.state()

    def load_state(self, state: Any) -> None:
        """Have the next pass begin where the state was taken."""
        self._check_seen()
        with self._changed:
            self.leave(self._ticket)
            self._await(lambda: not self._running)
            self.passes.load_state(state)
            self._within = False

    def restart(self) -> None:
        """Leave the pass under way; a graph's next batch is the first of another."""
        with self._changed:
            self.check_open()
            self.leave(self._ticket)
            self._await(lambda: self._open or not self._running)
            if self.unseen and not self._open:  # the thread was through with it
                self._ask()

    def close(self) -> None:
        """End the thread. From any thread, from any state; a source that does not come back is left alone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sink.close()
        if self._on_close:
            self._on_close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)
        if thread is None or not thread.is_alive():
            self.passes.close()

    def check_open(self) -> None:
        if self._closed:
            raise UsageError("this input is closed; make a new one")

    def _check_seen(self) -> None:
        if self.unseen:
            raise UsageError(
                "what a graph dequeues is not seen; iterate the input in Python to know its state"
            )

    def _ask(self) -> None:
        self._state = UNBEGUN
        self._states.clear()
        self._within = True
        self._open = self._fresh = self._running = True
        self._leaving = self._again = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shardprep-feeder", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _finish(self) -> None:
        """The consumer knows that the pass is over."""
        self._open = self._within = False
        self.occupancy.epoch()
        if self.unseen and not self._closed:
            if self._running:  # not to be waited for on a thread that its last step may need
                self._again = True
            else:
                self._ask()

    def _await_element(self, ticket: int) -> float | None:
        """Seconds that it took, None for an element that was there."""
        began, waited = perf_counter(), False
        while True:
            self.check_open()
            if ticket != self._ticket or not self._open:
                raise UsageError(
                    "another iteration of this input has begun; end the first, or use two inputs"
                )
            if self._sink.level():
                return perf_counter() - began if waited else None
            waited = True
            self._changed.wait(LOOK_AGAIN)

    def _await(self, done: Callable[[], bool]) -> None:
        while not done():
            self.check_open()
            self._changed.wait(LOOK_AGAIN)

    # The thread's side

    def _serve(self) -> None:
        while self._wait_for_wish():
            try:
                status = self._carry_out()
                if not self._leaving:
                    self._sink.put(status, [])
            except SinkClosed:
                return
            with self._changed:
                if self._leaving and not self._closed:
                    self._sink.empty()
                self._running = False
                if (self._leaving or self._again) and self.unseen and not self._closed:
                    self._ask()
                self._changed.notify_all()

    def _wait_for_wish(self) -> bool:
        with self._changed:
            while not self._running and not self._closed:
                self._changed.wait()
            return not self._closed

    def _carry_out(self) -> Status:
        try:
            batches = self.passes.begin()
            try:
                self._begun()
                self._put_all(batches)
            finally:
                end(batches)
        except SinkClosed:
            raise
        except PassEnded:
            return Status.END
        except BaseException as error:  # the consumer's to raise, whatever it is
            if self._closed:
                raise SinkClosed from error
            self._failures.append(Failure(original_of(error) or error))
            return Status.ERROR
        return Status.END

    def _begun(self) -> None:
        state = None if self.unseen else self.passes.state()
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _put_all(self, batches: Iterator[Any]) -> None:
        while (leaves := self._drawn(batches)) is not None:
            if self._closed:
                raise SinkClosed
            if self._leaving:
                return
            if not self.unseen:
                self._states.append(self.passes.state())
            self._put(leaves)
            del leaves  # or the loop holds one more batch while it waits for the next

    def _drawn(self, batches: Iterator[Any]) -> Leaves | None:
        began = perf_counter()
        for batch in batches:
            got = perf_counter()
            leaves = self._leaves_of(batch)
            self.occupancy.drew(got - began, perf_counter() - got)
            return leaves
        return None

    def _put(self, leaves: Leaves) -> None:
        level, began = self._sink.level(), perf_counter()
        self._sink.put(Status.BATCH, leaves)
        full = level >= self._sink.capacity
        self.occupancy.fed(level, full=full, seconds=perf_counter() - began, unseen=self.unseen)
        with self._changed:
            self._changed.notify_all()
