"""Inputs that a thread of their own fills ahead of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

from ...formats.errors import UsageError
from ..passes import Passes
from .feeder import Feeder
from .framework import tf
from .gate import weak
from .input import Input
from .occupancy import InputStats, loader_stats
from .session_sinks import SessionSink
from .sink import Leaves, Sink
from .source_input import SourceInput


class FedInput(SourceInput):
    """An input over a sink and the feeder that fills it; under v1 it is :meth:`start` that sets it going.

    ``state_dict`` is the source's as of the last batch that came out here, however many more wait inside;
    ``load_state_dict`` gives it back to the source for the next epoch. UsageError where a graph dequeues.
    """

    def __init__(self, passes: Passes, element_spec: Any, sink: Sink, feeder: Feeder) -> None:
        super().__init__(passes, element_spec)
        self._sink = sink
        self._feeder = feeder
        # multiprocessing's, for it runs before an engine ends its workers, and while threads can still be joined
        self._finalizer = Finalize(self, feeder.close, exitpriority=20)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._sink, SessionSink):
            raise UsageError("this input belongs to a v1 graph: call dequeue() there, and start(session)")
        if not tf.executing_eagerly():
            raise UsageError("inputs are iterated in eager code; within a tf.function call dequeue()")
        return self._epoch(self._feeder.begin())

    def _epoch(self, ticket: int) -> Iterator[Any]:
        try:
            while (leaves := self._feeder.take(ticket)) is not None:
                batch = [self._form(leaves)]
                del leaves
                yield batch.pop()  # what this frame kept would hold its slot while the next is awaited
        finally:
            self._feeder.leave(ticket)

    def _dequeue_in_graph(self) -> Any:
        if isinstance(self._sink, SessionSink):
            self._feeder.check_open()
            self._feeder.unseen = True
        else:
            self._feeder.take_unseen()
        return self.packed(self._dequeue_op(weak(self._feeder.ended)))

    def _dequeue_op(self, ended: Callable[[int], None]) -> Leaves:
        leaves: Leaves = self._sink.dequeue(ended)  # type: ignore[attr-defined]
        return leaves

    def _form(self, leaves: Leaves) -> Any:
        """What eager code gets for the leaves of the sink's element."""
        return self.packed(leaves)

    def start(self, session: Any) -> None:
        if isinstance(self._sink, SessionSink):
            self._sink.attach(session)
            self._feeder.take_unseen()

    def reset(self) -> None:
        """Leave the epoch that is under way: the next batch is the first of another."""
        self._drawing = None
        self._feeder.restart()

    def state_or_none(self) -> Any:
        """``state_dict()``, None where the source has none."""
        return self._feeder.state()

    def load_state_dict(self, state: Any) -> None:
        self._drawing = None
        self._feeder.load_state(state)

    def stats(self) -> InputStats:
        source = self._passes.source
        return self._feeder.occupancy.read(
            type(self).__name__,
            capacity=self._sink.capacity,
            level=self._sink.level(),
            source=source.stats() if isinstance(source, Input) else None,
            loader=loader_stats(source),
        )

    def close(self) -> None:
        self._drawing = None
        self._finalizer()
