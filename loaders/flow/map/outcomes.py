"""The outcomes that workers send back for items: results, or exceptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.pickling import Pickled
from shardprep.loaders.engine.protocol import worker_errors
from shardprep.loaders.engine.protocol.task import AsObject


@dataclass(frozen=True)
class Raised:
    """A packed exception in the place of a result, so that the results before it come first."""

    packed: bytes


def outcome_of(result: Any) -> object:
    """The outcome for a result. Raises UsageError for a result that cannot be sent."""
    if type(result) is bytes or (type(result) is np.ndarray and not result.dtype.hasobject):
        return result
    try:
        return Pickled.of(result)
    except Exception as error:
        raise UsageError(
            f"a result, a {type(result).__name__}, cannot be sent from another process: {error}. Return what can "
            "be pickled, or use threads"
        ) from error


def raised(error: BaseException) -> AsObject:
    """The outcome for an exception."""
    return AsObject(Raised(worker_errors.pack(error)))


def restored(payload: object, where: Callable[[], str]) -> Any:
    """Return the worker's result, or raise the worker's exception with ``where()`` as a note."""
    if isinstance(payload, Raised):
        raise _continued(worker_errors.unpack(payload.packed, where()))
    return bytes(payload) if isinstance(payload, memoryview) else payload


def _continued(error: BaseException) -> BaseException:
    """Return the error; a StopIteration becomes a RuntimeError, because a generator cannot raise it."""
    if not isinstance(error, StopIteration):
        return error
    stopped = RuntimeError("the function raised StopIteration")
    for note in error.__notes__:
        stopped.add_note(note)
    return stopped
