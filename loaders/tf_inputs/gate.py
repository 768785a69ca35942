"""What a graph calls: the end of a pass and a source's failure, told within it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ...formats.errors import UsageError
from .framework import tf
from .sink import Status


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of an object's method that does not keep the object: what TensorFlow is given to call, it never drops."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        if bound is None:
            raise UsageError("the input that this belongs to is gone; keep it as long as it is used")
        return bound(*args)

    return call


def gate(status: Any, ended: Callable[[int], None]) -> Any:
    """A tensor that is there once ``status`` says that a batch was dequeued; use it as a control dependency.

    Otherwise ``ended(status)`` is called, which raises: StopIteration is OutOfRangeError to TensorFlow. Where
    it does not, because another replica's call does, the tensor is False. A batch costs one comparison;
    Python runs only at the end.
    """

    def call_ended(found: Any) -> bool:
        ended(int(found))
        return False

    with tf.device("CPU:0"):
        return tf.cond(
            tf.equal(status, int(Status.BATCH)),
            lambda: tf.constant(True),
            lambda: tf.numpy_function(call_ended, [status], tf.bool),
        )


def shaped(tensors: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    """The tensors, with what is known of their shapes."""
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(tensors)


def end_epoch(status: int) -> None:
    """What a gate calls where nothing but the epoch's end can have come."""
    raise StopIteration
