"""Batches that are computed by TensorFlow itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...formats.errors import UsageError
from .framework import tf
from .input import Input
from .occupancy import InputStats, Occupancy
from .signature import flat, renamed


class TensorInput(Input):
    """The tensors that ``make()`` returns, called for each batch in eager code, once for each graph.

    ``length`` batches are an epoch; without it, and in a graph, there is no end. ``signature`` is what
    ``make`` returns, found out by calling it once where it is not given.
    """

    def __init__(self, make: Callable[[], Any], *, length: int | None = None, signature: Any = None) -> None:
        if not callable(make) or (length is not None and length < 0):
            raise UsageError(
                f"make={make!r}, length={length}: a function that returns tensors, and None or a number"
            )
        self._make = make
        self._length = length
        self.element_spec = signature if signature is not None else _spec_of(make)
        self._occupancy = Occupancy()
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        made = 0
        while self._length is None or made < self._length:
            self._check_open()
            self._occupancy.taken(waited=None)
            yield self._make()
            made += 1
        self._occupancy.epoch()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this input is closed; make a new one")

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this input has no end; give it a length")
        return self._length

    @property
    def batches_per_epoch(self) -> int | None:
        """The length; None without one."""
        return self._length

    def _dequeue_in_graph(self) -> Any:
        self._check_open()
        return self._make()

    def stats(self) -> InputStats:
        return self._occupancy.read(type(self).__name__, capacity=0, level=0)

    def close(self) -> None:
        self._closed = True
        self._drawing = None


class DummyConstantInput(TensorInput):
    """Zeros of a signature (``tf.TensorSpec``\\ s of known shapes), always the same: how fast is the step alone?"""

    def __init__(self, signature: Any, *, length: int | None = None) -> None:
        for spec in flat(signature):
            if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
                raise UsageError(f"a constant needs a tf.TensorSpec whose shape is known, not {spec!r}")
        kept = _zeros(signature) if tf.executing_eagerly() else None

        def make() -> Any:
            return kept if tf.executing_eagerly() else _zeros(signature)

        super().__init__(make, length=length, signature=signature)


def _zeros(signature: Any) -> Any:
    return renamed(signature, [tf.zeros(spec.shape, spec.dtype) for spec in flat(signature)])


def _spec_of(make: Callable[[], Any]) -> Any:
    with tf.Graph().as_default():  # what it says of its shapes is what a graph knows
        return tf.nest.map_structure(tf.TensorSpec.from_tensor, make())
