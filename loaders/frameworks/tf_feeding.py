"""The thread that feeds a source's batches into a sink, and passes that TensorFlow pulls."""

from __future__ import annotations

import itertools
import re
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.util import is_exiting
from operator import length_hint
from threading import get_ident
from time import perf_counter, sleep
from typing import Any, Literal
from weakref import WeakValueDictionary

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.owners import Owner
from shardprep.loaders.batches.passes import Passes, end_pass, ending
from shardprep.loaders.frameworks.tensors import Leaves, empty_tensors, flatten, make_leaves, tensor_of, tf
from shardprep.loaders.frameworks.tf_graph import PassEnded, Sink, SinkClosed, Status, check_use, closing_lock
from shardprep.loaders.frameworks.tf_stats import Occupancy

CLOSE_TIMEOUT_S = 5.0  # the longest wait of a closing input for its source
RETURN_S = 0.1  # the time that TensorFlow's own Python code takes between two calls
POLL_INTERVAL_S = 0.5  # a waiting thread checks that often, in case a notification was lost
NOT_BEGUN = object()  # the state of a pass that the thread has not begun
_numbers = itertools.count(1)
_failures: WeakValueDictionary[int, SourceFailure] = WeakValueDictionary()


class InputFailed(RuntimeError):
    """Stands for the source's error within TensorFlow; :func:`original_errors` raises the original."""


class SourceFailure:
    """A source's exception, found by its number while the input keeps this object."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self._number = next(_numbers)
        _failures[self._number] = self

    def take_error(self) -> BaseException | None:
        """Return the error, once: its traceback refers to frames that may keep the input alive."""
        error, self.error = self.error, None
        return error

    def to_input_failed(self) -> InputFailed:
        """Return the exception to raise within TensorFlow, with the error's text and number."""
        text = "".join(traceback.format_exception(self.error))
        return InputFailed(f"the input failed [shardprep failure {self._number}]\n{text}")


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise the original exception of an input in place of TensorFlow's, which becomes its cause.

    A context manager and decorator for code that TensorFlow runs: ``model.fit``, a ``tf.function`` that
    dequeues, a session's ``run``. Iterating an input in Python does so anyway. Thread-safe.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if (original := take_original_error(error)) is None:
            raise
        raise original from error


def take_original_error(error: BaseException) -> BaseException | None:
    """Return the exception behind a TensorFlow error, once; None for TensorFlow's own errors."""
    match = re.search(r"\[shardprep failure (\d+)\]", str(error))
    failure = _failures.get(int(match[1])) if match else None
    return failure.take_error() if failure else None


@dataclass
class _Pass:
    """A pass that the consumer has requested, with the progress of both sides."""

    is_fed: bool = False  # the thread has put all its elements
    use: Literal["none", "begun", "left", "over"] = "none"  # by the consumer, who may leave it early
    is_followed: bool = False  # a graph requested the next pass before the thread finished this one
    state: Any = NOT_BEGUN  # the source's state after the batch taken last
    states: deque[Any] = field(default_factory=deque)  # its states after the batches in the sink

    @property
    def is_open(self) -> bool:
        return self.use in ("none", "begun")


@dataclass(eq=False, repr=False)
class Feeder(Owner):
    """Puts the passes of a source into a sink, each on request, each followed by END or ERROR.

    One consumer takes elements: in Python with :meth:`take`, or unseen in a graph, which calls
    :meth:`report_end`. If the consumer ends a pass early, the sink is emptied before the next pass begins.
    """

    passes: Passes
    sink: Sink
    leaves_of: Callable[[Any], Leaves]
    on_close: Callable[[], None] | None = None  # may wake a source that the thread waits for

    def __post_init__(self) -> None:
        self.occupancy = Occupancy()
        self.unseen = False  # a graph takes; as it cannot request the next pass, that begins at once
        self._changed = threading.Condition()
        self._epoch_number = 0
        self._pass = _Pass(is_fed=True, use="over")
        self._closed = False
        self._failures: deque[SourceFailure] = deque(maxlen=2)  # of this pass and, in a graph, the next
        self._thread: threading.Thread | None = None

    def begin(self) -> int:
        """Begin an epoch and return its number. A pass from which nothing was taken is used again."""
        self.refuse_forked("input")
        with self._changed:
            self.check_open()
            if self.unseen or self._pass.use != "none":
                self.leave(self._epoch_number)
                self._wait_until(lambda: self._pass.use == "none" or self._pass.is_fed)
            if self._pass.use != "none":
                self._request_pass()
            self._epoch_number += 1
            return self._epoch_number

    def take(self, epoch_number: int) -> Leaves | None:
        """Return the epoch's next batch, None at its end. Raises UsageError and the source's errors."""
        self.refuse_forked("input")  # a forked copy has no threads
        with self._changed:
            waited = self._await_element(epoch_number)
            current = self._pass
            current.use = "begun"
            status, leaves = self.sink.take()
            if status == Status.BATCH:
                self.occupancy.count_step(waited=waited)
                current.state = current.states.popleft() if current.states else None
                return leaves
            self._finish_pass()
            if status == Status.ERROR:  # not kept, because its traceback would keep this input alive
                raise self._failures.pop().take_error() or RuntimeError
            return None

    def leave(self, epoch_number: int) -> None:
        """End the epoch early: empty the sink, so that the thread can finish."""
        if not self.was_made_here:  # the thread may have held the lock
            return
        with self._changed:
            if self._pass.is_open and epoch_number == self._epoch_number and not self._closed:
                self._pass.use = "left"
                self.sink.empty()
                self._changed.notify_all()

    def hand_to_graph(self) -> None:
        """Let a graph take the batches from now on."""
        with self._changed:
            self.check_open()
            self.unseen = True
            self._wait_until(lambda: self._pass.is_open or self._pass.is_fed)
            if not self._pass.is_open:
                self._request_pass()

    def report_end(self, status: int) -> None:
        """Raise StopIteration or InputFailed in a graph that has taken END or ERROR."""
        with self._changed:
            failure = self._failures[-1] if status == Status.ERROR else None
            self._finish_pass()
        if failure:
            raise failure.to_input_failed()
        raise StopIteration  # TensorFlow turns it into OutOfRangeError

    def state(self) -> Any:
        """Return the source's state as of the batch taken last."""
        self._check_counted()
        with self._changed:
            own = self._pass
            self._wait_until(lambda: own.use == "over" or own.state is not NOT_BEGUN or own.is_fed)
            if own.use != "over" and own.state is not NOT_BEGUN:
                return own.state
            self._wait_until(lambda: own.is_fed)
            return self.passes.state()

    def load_state(self, state: Any, **options: Any) -> None:
        """Begin the next pass where the state was taken."""
        self._check_counted()
        with self._changed:
            self.leave(self._epoch_number)
            self._wait_until(lambda: self._pass.is_fed)
            self.passes.load_state(state, **options)
            self._pass.use = "over"

    def restart(self) -> None:
        """End the current pass early; a graph's next batch is the first of another pass."""
        with self._changed:
            self.check_open()
            self.leave(self._epoch_number)
            self._wait_until(lambda: self._pass.is_open or self._pass.is_fed)
            if self.unseen and not self._pass.is_open:  # the thread had finished the pass
                self._request_pass()

    def close(self) -> None:
        """End the thread. For any thread, in any state, and for garbage collection.

        Waits at most a few seconds for the lock, and for the thread, as the source may not return.
        """
        if not self.was_made_here:
            return
        with closing_lock(self._changed):
            self._closed = True
        self.sink.close()
        if self.on_close:
            self.on_close()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)
        if thread is None or not thread.is_alive():
            self.passes.close()

    def check_open(self) -> None:
        check_use(self._closed)

    def _check_counted(self) -> None:
        if self.unseen:
            raise UsageError(
                "batches dequeued by a graph are not counted; iterate the input in Python to know its state"
            )

    def _request_pass(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shardprep-feeder", daemon=True)
        if self._thread.ident is None:
            self._thread.start()
        self._pass = _Pass()
        self._changed.notify_all()

    def _finish_pass(self) -> None:
        """Record that the consumer has seen the end of the pass."""
        self._pass.use = "over"
        self.occupancy.count_epoch()
        if self.unseen and not self._closed:
            if self._pass.is_fed:
                self._request_pass()
            else:  # don't wait: the thread's last step may need this thread of TensorFlow's
                self._pass.is_followed = True

    def _await_element(self, epoch_number: int) -> float | None:
        """Wait for an element. Return the seconds waited, None if one was there."""
        began, waited = perf_counter(), False
        while True:
            check_use(self._closed, epoch_number == self._epoch_number and self._pass.is_open)
            if self.sink.level():
                return perf_counter() - began if waited else None
            waited = True
            self._changed.wait(POLL_INTERVAL_S)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.check_open()
            self._changed.wait(POLL_INTERVAL_S)

    # The thread's side

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._pass.is_fed and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                current = self._pass
            try:
                status = self._feed(current)
                if current.use != "left":
                    self.sink.put(status, [])
            except SinkClosed:
                return
            with self._changed:
                if current.use == "left" and not self._closed:
                    self.sink.empty()
                current.is_fed = True
                if (current.use == "left" or current.is_followed) and self.unseen and not self._closed:
                    self._request_pass()
                self._changed.notify_all()

    def _feed(self, current: _Pass) -> Status:
        """Put the batches of a pass into the sink; return the status of its end."""
        try:
            with ending(self.passes.begin()) as batches:
                state = None if self.unseen else self.passes.state()
                with self._changed:
                    current.state = state
                    self._changed.notify_all()
                self._put_all(batches, current)
        except SinkClosed:
            raise
        except PassEnded:
            return Status.END
        except BaseException as error:  # raised in the consumer
            if self._closed:
                raise SinkClosed from error
            self._failures.append(SourceFailure(take_original_error(error) or error))
            return Status.ERROR
        return Status.END

    def _put_all(self, batches: Iterator[Any], current: _Pass) -> None:
        while True:
            began = perf_counter()
            if not (drawn := list(islice(batches, 1))):
                return
            got = perf_counter()
            leaves = self.leaves_of(drawn.pop())
            self.occupancy.count_draw(got - began, perf_counter() - got)
            if self._closed:
                raise SinkClosed
            if current.use == "left":
                return
            if not self.unseen:
                current.states.append(self.passes.state())
            level, began = self.sink.level(), perf_counter()
            self.sink.put(Status.BATCH, leaves)
            del leaves  # otherwise held while the loop waits for the next batch
            full = level >= self.sink.capacity
            self.occupancy.count_put(level, full=full, seconds=perf_counter() - began, unseen=self.unseen)
            with self._changed:
                self._changed.notify_all()


class PulledPasses(Owner):
    """Passes pulled by their number; beginning one ends the one before. Thread-safe."""

    def __init__(self, passes: Passes, element_spec: Any) -> None:
        self._passes = passes
        self._element_spec = element_spec
        self._failures: deque[SourceFailure] = deque(maxlen=2)
        self._changed = threading.Condition()
        self._number = 0
        self._batches: Iterator[Any] = iter(())
        self._pulling = 0
        self._called: list[int] = []  # the threads of TensorFlow that are in a call
        self._returned = -RETURN_S  # when the last call returned
        self._closed = False

    def begin(self) -> int:
        """Begin a pass and return its number. Raises UsageError after close(), and the source's errors."""
        with self._changed:
            check_use(self._closed)
            self.leave()
            number = self._number
        length = length_hint(self._passes)
        batches = self._passes.begin()
        batches.remaining = length or batches.remaining  # Keras does not ask for an end that it knows
        with self._changed:
            if number == self._number:
                self._batches = batches
        return number

    def leave(self, number: int | None = None) -> None:
        """End the pass with this ``number`` if it is the current one; None ends any."""
        if not self.was_made_here:  # a thread may have held the lock
            return
        with self._changed:
            if number in (None, self._number):
                self._number += 1
                if not self._pulling:  # otherwise the pulling thread ends it
                    end_pass(self._batches)

    def next(self, number: int) -> Any:
        """Return the pass's next batch, None at its end. Raises UsageError once another has begun."""
        with self._changed:
            check_use(self._closed, number == self._number)
            self._pulling += 1
            batches = self._batches
        try:
            batch = next(batches, None)
        finally:
            with self._changed:
                if number != self._number or self._closed:
                    end_pass(batches)
                self._pulling -= 1
                self._changed.notify_all()
        check_use(self._closed, number == self._number)
        return batch

    def begin_for_tensorflow(self) -> int:
        """Begin a pass as :meth:`begin` does, with errors for :func:`original_errors`."""
        with self._errors_for_tensorflow():
            return self.begin()

    def next_for_tensorflow(self, number: Any) -> list[Any]:
        """Return the next element, its status first, with errors for :func:`original_errors`."""
        with self._errors_for_tensorflow():
            batch = self.next(int(number))
            if batch is None:
                return [tf.constant(int(Status.END), tf.uint8), *empty_tensors(flatten(self._element_spec))]
            zero_copy = self._passes.batches_never_change
            leaves = make_leaves(tensor_of, self._element_spec, batch, zero_copy=zero_copy)
            return [tf.constant(int(Status.BATCH), tf.uint8), *leaves]

    @contextmanager
    def _errors_for_tensorflow(self) -> Iterator[None]:
        self._called.append(get_ident())
        try:
            yield
        except BaseException as error:  # TensorFlow would keep only its text
            failure = SourceFailure(take_original_error(error) or error)
            self._failures.append(failure)
            raise failure.to_input_failed() from error
        finally:
            with self._changed:
                self._called.remove(get_ident())
                self._returned = perf_counter()
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse new calls, and wait a few seconds for running ones. Garbage collection may call it.

        At its exit, the interpreter waits forever for a thread of TensorFlow that is still in Python code. So
        such a thread gets the time to return, and to be refused if it calls again.
        """
        if not self.was_made_here:
            return
        with closing_lock(self._changed) as is_held:
            self._closed = True
            if is_held and self._changed.wait_for(
                lambda: not self._pulling and set(self._called) <= {get_ident()}, CLOSE_TIMEOUT_S
            ):
                end_pass(self._batches)
                self._passes.close()
        while is_exiting() and (left := self._returned + RETURN_S - perf_counter()) > 0:
            sleep(left)
