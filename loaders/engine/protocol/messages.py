"""The messages of an engine and a worker: fixed structs, then the bytes of items or of outcomes."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from .leases import Lease
from .task import Items

_LEASE = struct.Struct("<QQII")
_ANSWER = struct.Struct("<BQI")

MAX_LEASE_BYTES = 1 << 15  # all leases of a worker fit its socket: sending to a stopped worker does not wait


class Answer(IntEnum):
    """The kind of a worker's message."""

    READY = 0  # the work is open
    DONE = 1  # a lease is finished, its outcomes follow; or its run is over and it was not begun
    FAILED = 2  # a row of a lease raised, or, before READY, opening did; the packed exception follows


def pack_lease(lease: Lease) -> tuple[bytes, bytes]:
    return _LEASE.pack(lease.id, lease.run, lease.slot, lease.first), lease.items.tobytes()


def unpack_lease(message: bytes, dtype: np.dtype[np.void]) -> Lease:
    """Return the lease that was sent, without the number of its batch, which a worker does not need."""
    lease_id, run, slot, first = _LEASE.unpack_from(message)
    items: Items = np.frombuffer(message, dtype, offset=_LEASE.size)
    return Lease(lease_id, run, -1, slot, first, items)


def pack_answer(answer: Answer, lease_id: int = 0, row: int = 0) -> bytes:
    return _ANSWER.pack(answer, lease_id, row)


def unpack_answer(message: bytes) -> tuple[Answer, int, int, memoryview]:
    """Return the answer, the lease, the row of the lease, and the rest of the message."""
    answer, lease_id, row = _ANSWER.unpack_from(message)
    return Answer(answer), lease_id, row, memoryview(message)[_ANSWER.size :]
