"""What a worker made of an item, on its way back: a result as what it is, or what was raised instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formats.errors import UsageError
from .. import failures
from ..pickled import Pickled
from ..work import Whole


@dataclass(frozen=True)
class Raised:
    """An exception in an item's place, packed: what was made before it comes before it."""

    packed: bytes


def outcome_of(result: Any) -> object:
    """What a worker yields for a result. Raises UsageError for one that cannot be sent."""
    if type(result) is bytes or (type(result) is np.ndarray and not result.dtype.hasobject):
        return result
    try:
        return Pickled.of(result)
    except Exception as error:
        raise UsageError(
            f"a result, a {type(result).__name__}, cannot be sent from another process: {error}. Return what can "
            "be pickled, or use threads"
        ) from error


def raised(error: BaseException) -> Whole:
    """What a worker yields for an exception."""
    return Whole(Raised(failures.pack(error)))


def restored(payload: object, where: Callable[[], str]) -> Any:
    """The result that a worker had, or its exception, raised, with a note that says ``where``."""
    if isinstance(payload, Raised):
        raise _continued(failures.unpack(payload.packed, where()))
    return bytes(payload) if isinstance(payload, memoryview) else payload


def _continued(error: BaseException) -> BaseException:
    """A generator cannot raise StopIteration."""
    if not isinstance(error, StopIteration):
        return error
    stopped = RuntimeError("the function raised StopIteration")
    for note in error.__notes__:
        stopped.add_note(note)
    return stopped
