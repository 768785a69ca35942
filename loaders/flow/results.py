"""What a worker made of an item, on its way back: a result as what it is, or what was raised instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import failures
from ..work import Whole


@dataclass(frozen=True)
class Raised:
    """An exception in an item's place, packed: what was made before it comes before it."""

    packed: bytes


def outcome_of(result: Any) -> object:
    """What a worker yields for a result."""
    return result if type(result) in (np.ndarray, bytes) else Whole(result)


def raised(error: Exception) -> Whole:
    """What a worker yields for an exception."""
    return Whole(Raised(failures.pack(error)))


def restored(payload: object, where: str) -> Any:
    """The result that a worker had, or its exception, raised, with a note that says ``where``."""
    if isinstance(payload, Raised):
        raise failures.unpack(payload.packed, where)
    return bytes(payload) if isinstance(payload, memoryview) else payload
