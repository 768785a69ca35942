"""What an engine and a worker say to each other: fixed structs, then the bytes of items or of outcomes."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from .leases import Lease
from .work import Items

_LEASE = struct.Struct("<QQII")
_ANSWER = struct.Struct("<BQI")

MAX_LEASE_BYTES = 1 << 15  # all that a worker holds fits its socket: leasing to a stopped one does not wait


class Answer(IntEnum):
    """What a worker says."""

    READY = 0  # the work is open
    DONE = 1  # a lease is finished, its outcomes follow; or its run is over and it was left alone
    FAILED = 2  # a row of a lease raised, or, before READY, opening did; the packed exception follows


def pack_lease(lease: Lease) -> tuple[bytes, bytes]:
    return _LEASE.pack(lease.id, lease.run, lease.slot, lease.first), lease.items.tobytes()


def unpack_lease(message: bytes, dtype: np.dtype[np.void]) -> Lease:
    """As it was sent, but for the number of its batch, which a worker need not know."""
    lease_id, run, slot, first = _LEASE.unpack_from(message)
    items: Items = np.frombuffer(message, dtype, offset=_LEASE.size)
    return Lease(lease_id, run, -1, slot, first, items)


def pack_answer(answer: Answer, lease_id: int = 0, row: int = 0) -> bytes:
    return _ANSWER.pack(answer, lease_id, row)


def unpack_answer(message: bytes) -> tuple[Answer, int, int, memoryview]:
    """Answer, lease, row of the lease, and what follows."""
    answer, lease_id, row = _ANSWER.unpack_from(message)
    return Answer(answer), lease_id, row, memoryview(message)[_ANSWER.size :]
