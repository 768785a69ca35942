"""Python functions that a graph calls to report the end of a pass or the failure of a source."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.tf_inputs.tensors.framework import tf

from .sink import Status


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the method without a reference to its object.

    TensorFlow keeps the functions that it is given for ever. Raises UsageError when the object is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        if bound is None:
            raise UsageError("the input that this belongs to is gone; keep it as long as it is used")
        return bound(*args)

    return call


def batch_or_end(status: Any, ended: Callable[[int], None]) -> Any:
    """Return a tensor for a control dependency: True where ``status`` is that of a batch.

    Otherwise the graph calls ``ended(status)``, which raises; TensorFlow turns StopIteration into
    OutOfRangeError. Where it does not raise, because another replica's call does, the tensor is False. A
    batch costs one comparison; Python code runs only at the end of a pass.
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
    """Return the tensors, with their known static shapes set."""
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(tensors)


def end_epoch(status: int) -> None:
    """Raise StopIteration, where no element but the end of an epoch can follow the batches."""
    raise StopIteration
