"""The base classes of all inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

from shardprep.formats.errors import UsageError
from shardprep.formats.system.owned import Owned
from shardprep.loaders.batching.keras_hint import KerasHint
from shardprep.loaders.batching.passes import Passes
from shardprep.loaders.tf_inputs.feeding.stats import InputStats
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import flat, leaves_of, renamed

from .to_dataset import to_dataset


class Input(KerasHint, Owned, ABC):
    """Batches as TensorFlow's tensors, in the form of ``element_spec``, epoch after epoch.

    Iterating an input in eager code is one epoch: errors of the source are raised unchanged, Ctrl-C works,
    and leaving the loop ends the epoch. :meth:`dequeue` returns the next batch in eager code, in a
    ``tf.function`` or in a v1 graph, and raises ``tf.errors.OutOfRangeError`` at the end of each epoch. In a
    graph, a source's error is raised as TensorFlow's; ``with original_errors():`` raises the original.
    ``len()`` is the number of batches of the next epoch, where the source knows it.

    A context manager. It may be closed twice, from any thread and in any state; it is closed when it is
    dropped and when the interpreter ends. One thread at a time may draw from it. Neither copyable nor
    picklable.
    """

    instead = "make the input where it is needed, over a source of its own"
    for_keras = "its as_dataset()"

    element_spec: Any
    _drawing: Iterator[Any] | None = None  # the current epoch of dequeue() in eager code

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of the next epoch. Raises TypeError where it is not known."""

    def dequeue(self) -> Any:
        """Return the next batch. Raises OutOfRangeError at the end of an epoch."""
        if not tf.executing_eagerly():
            return self._dequeue_in_graph()
        drawing, self._drawing = self._drawing or iter(self), None
        for batch in drawing:
            self._drawing = drawing
            return batch
        raise tf.errors.OutOfRangeError(None, None, "the epoch is over; the next call begins another")

    @abstractmethod
    def _dequeue_in_graph(self) -> Any:
        """Return the next batch as an operation of the graph that is being built."""

    @abstractmethod
    def stats(self) -> InputStats:
        """Return the counts and times since the input was made. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Stop, wake waiting threads, and drop all batches. Idempotent."""

    def state_or_none(self) -> Any:
        """Return the source's state; None for a source without one."""
        return None

    def state_dict(self) -> Any:
        """Return the source's state. Raises UsageError for a source without one."""
        state = self.state_or_none()
        if state is None:
            raise UsageError(
                "the source of this input has no state to keep here; give it a Loader, or a Flow with items by number"
            )
        return state

    def start(self, session: Any) -> None:
        """Start to feed in this session, for an input of a v1 graph. Does nothing in eager mode."""

    def as_dataset(self, *, prefetch: int = 1) -> Any:
        """Return a ``tf.data.Dataset``, for ``model.fit``. Each iteration of it is an epoch of this input.

        ``prefetch`` is the number of batches that ``tf.data`` draws ahead.
        """
        return to_dataset(self, prefetch=prefetch)

    @property
    def specs(self) -> list[Any]:
        """The leaves of ``element_spec``."""
        return flat(self.element_spec)

    def leaves(self, batch: Any) -> list[Any]:
        """Return the parts of a batch in the order of the leaves."""
        return leaves_of(self.element_spec, batch)

    def packed(self, leaves: list[Any]) -> Any:
        """Return leaves in the form of ``element_spec``."""
        return renamed(self.element_spec, leaves)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SourceInput(Input):
    """An input over the passes of a source; each pass is an epoch."""

    def __init__(self, passes: Passes, element_spec: Any) -> None:
        self._passes = passes
        self.element_spec = element_spec

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of batches of every epoch; None where it is unknown."""
        return self._passes.steady_length
