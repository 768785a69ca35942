"""What every input is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

from ...formats.errors import UsageError
from .framework import tf
from .occupancy import InputStats
from .signature import flat, renamed
from .structure import leaves_of


class Input(ABC):
    """Batches as TensorFlow's tensors, in the form of ``element_spec``, epoch after epoch.

    Iterating it is one epoch, in eager code: errors of the source come as themselves, Ctrl-C is heard, and
    leaving the loop ends the epoch. :meth:`dequeue` gives the next batch to eager code, ``tf.function`` or a
    v1 graph, and raises ``tf.errors.OutOfRangeError`` at the end of each epoch; in a graph a source's error
    comes as TensorFlow's, which ``with original_errors():`` turns back. ``len()`` is the number of batches
    of the next epoch, where the source knows it.

    A context manager; safe to close twice, from any thread and in any state, and closed when it is dropped
    and when the interpreter ends. One thread at a time may draw from it. Not picklable.
    """

    element_spec: Any
    _drawing: Iterator[Any] | None = None  # the epoch that dequeue, in eager code, is in

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """How many batches the next epoch has. TypeError where nobody knows."""

    def dequeue(self) -> Any:
        """The next batch, or OutOfRangeError at the end of an epoch."""
        if not tf.executing_eagerly():
            return self._dequeue_in_graph()
        drawing, self._drawing = self._drawing or iter(self), None
        for batch in drawing:
            self._drawing = drawing
            return batch
        raise tf.errors.OutOfRangeError(None, None, "the epoch is over; the next call begins another")

    @abstractmethod
    def _dequeue_in_graph(self) -> Any:
        """The same as an operation of the graph that is being built."""

    @abstractmethod
    def stats(self) -> InputStats:
        """What was counted since the input was made. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Stop, wake who waits, and let go of what is held. Idempotent."""

    def state_or_none(self) -> Any:
        """Where the source is, None for one that does not tell."""
        return None

    def state_dict(self) -> Any:
        """The source's state. Raises UsageError where it has none."""
        state = self.state_or_none()
        if state is None:
            raise UsageError("the source of this input has no state to keep; give it a Loader")
        return state

    def start(self, session: Any) -> None:  # noqa: B027 - most inputs have nothing to start
        """Under v1: feed from now on in this session. Nothing to do in eager mode."""

    def as_dataset(self, *, prefetch: int = 1) -> Any:
        """A ``tf.data.Dataset`` of which each iteration is an epoch of this input, as ``model.fit`` wants it."""
        from .dataset import to_dataset

        return to_dataset(self, prefetch=prefetch)

    @property
    def specs(self) -> list[Any]:
        """The leaves of ``element_spec``."""
        return flat(self.element_spec)

    def leaves(self, batch: Any) -> list[Any]:
        """The parts of a batch in the order of the leaves."""
        return leaves_of(self.element_spec, batch)

    def packed(self, leaves: list[Any]) -> Any:
        """Leaves in the form of ``element_spec``."""
        return renamed(self.element_spec, leaves)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
