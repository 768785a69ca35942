"""Inputs that are filled ahead of the step by their own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import Passes
from shardprep.loaders.tf_inputs.feeding.end_of_epoch import weak
from shardprep.loaders.tf_inputs.feeding.feeder import Feeder
from shardprep.loaders.tf_inputs.feeding.graph_sinks import SessionSink
from shardprep.loaders.tf_inputs.feeding.sink import Sink
from shardprep.loaders.tf_inputs.feeding.stats import InputStats
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import Leaves

from .input import SourceInput


class FedInput(SourceInput):
    """An input over a sink and the feeder that fills it; in a v1 graph :meth:`start` starts the feeder.

    ``state_dict`` is the source's state as of the last batch that this input delivered, for any number of
    batches in the sink. ``load_state_dict`` sets the source's state for the next epoch. Both raise UsageError
    where a graph dequeues.
    """

    def __init__(self, passes: Passes, element_spec: Any, sink: Sink, feeder: Feeder) -> None:
        super().__init__(passes, element_spec)
        self._sink = sink
        self._feeder = feeder
        # multiprocessing's finalizer runs before an engine ends its workers, while threads can be joined
        self._finalizer = Finalize(self, feeder.close, exitpriority=20)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._sink, SessionSink):
            raise UsageError("this input belongs to a v1 graph: call dequeue() there, and start(session)")
        if not tf.executing_eagerly():
            raise UsageError("inputs are iterated in eager code; within a tf.function call dequeue()")
        return self._epoch(self._feeder.begin())

    def _epoch(self, epoch_number: int) -> Iterator[Any]:
        try:
            while (leaves := self._feeder.take(epoch_number)) is not None:
                batch = [self._form(leaves)]
                del leaves
                yield batch.pop()  # a reference in this frame would hold the slot during the next wait
        finally:
            self._feeder.leave(epoch_number)

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
        """The batch that eager code gets for the leaves of the sink's element."""
        return self.packed(leaves)

    def start(self, session: Any) -> None:
        if isinstance(self._sink, SessionSink):
            self._sink.attach(session)
            self._feeder.take_unseen()

    def reset(self) -> None:
        """End the current epoch early: the next batch is the first of another epoch."""
        self._drawing = None
        self._feeder.restart()

    def state_or_none(self) -> Any:
        """``state_dict()``; None where the source has no state."""
        return self._feeder.state()

    def load_state_dict(self, state: Any) -> None:
        self._drawing = None
        self._feeder.load_state(state)

    def stats(self) -> InputStats:
        return self._feeder.occupancy.read(
            type(self).__name__,
            capacity=self._sink.capacity,
            level=self._sink.level(),
            source=self._passes.source,
        )

    def close(self) -> None:
        self._drawing = None
        self._finalizer()
