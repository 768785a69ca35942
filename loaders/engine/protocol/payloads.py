"""The message with the outcomes of rows: a table of fixed entries, and bodies in the message or the slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.loaders.buffers.memory import ALIGNMENT, aligned, is_usable
from shardprep.loaders.buffers.pickling import Pickled, unpickled
from shardprep.loaders.buffers.slots import Memory

from .task import AsObject, Skipped


class PayloadKind(IntEnum):
    """The kind of an entry's body; only OBJECT is pickled."""

    SKIPPED = 0
    BYTES = 1
    ARRAY = 2
    OBJECT = 3


_KINDS = tuple(PayloadKind)

# `at` counts from the start of the lease's spare bytes if `in_slot`, else from the start of the bodies.
_ENTRY = np.dtype(
    [("row", "<u4"), ("kind", "u1"), ("in_slot", "?"), ("at", "<u8"), ("size", "<u8"), ("form", "S40")]
)


class OutcomeWriter:
    """Writer of a lease's outcomes, ``rows`` so far; bodies go to ``spare`` while there is room."""

    def __init__(self, spare: Memory) -> None:
        self.rows = 0
        self._spare = spare
        self._used = 0
        self._room: Memory | None = None
        self._entries: list[tuple[int, PayloadKind, bool, int, int, bytes]] = []
        self._bodies: list[bytes] = []
        self._size = 0

    def add(self, outcome: object) -> None:
        """Add the outcome of the next row."""
        if self._room is not None and outcome is self._room:
            self._put(PayloadKind.BYTES, b"", self._room)
        elif outcome is not None:
            self._put(*_encode(outcome))
        self._room = None
        self.rows += 1

    def room(self, size: int) -> Memory:
        """Return memory for the body of the next row's outcome; it is freed if that is another object."""
        end = self._used + size
        self._room = self._spare[self._used : end] if end <= self._spare.size else np.empty(size, np.uint8)
        return self._room

    def _put(self, kind: PayloadKind, form: bytes, body: Memory | Pickled) -> None:
        end = self._used + body.size
        if fits := end <= self._spare.size:
            if body is not self._room:
                _lay(body, self._spare[self._used : end])
            at, self._used = self._used, -(-end // ALIGNMENT) * ALIGNMENT
        else:
            memory = np.empty(body.size, np.uint8)
            _lay(body, memory)
            self._bodies.append(memory.tobytes())
            at, self._size = self._size, self._size + body.size
        self._entries.append((self.rows, kind, fits, at, body.size, form))

    def parts(self) -> tuple[bytes, ...]:
        """Return the number of entries, the entries and the bodies; joined, a LeaseOutcomes' ``message``."""
        table = np.array(self._entries, _ENTRY).tobytes()
        return len(self._entries).to_bytes(4, "little"), table, *self._bodies


@dataclass(frozen=True)
class LeaseOutcomes:
    """The outcomes of one lease, of ``count`` rows from ``first`` on, as they arrived."""

    first: int
    count: int
    message: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of its payloads, in the message and in the slot."""
        return int(self._entries["size"].sum(dtype=np.int64))

    @property
    def _entries(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.message, _ENTRY, int.from_bytes(self.message[:4], "little"), 4)

    def unpack(self, spare: Memory, *, copied: bool = False) -> Iterator[tuple[int, object]]:
        """Yield the rows of the batch that have a payload or were Skipped; ``spare`` is the writer's.

        Payloads lie in it, unless they are ``copied``.
        """
        if self.message[:4] == bytes(4):
            return
        entries = self._entries
        bodies = np.frombuffer(self.message, np.uint8, offset=4 + entries.nbytes)
        for row, kind, in_slot, at, size, form in entries.tolist():
            body = (spare if in_slot else bodies)[at : at + size]
            yield self.first + row, _decode(_KINDS[kind], form, body, copied=copied)


def skipped_row(row: int, reason: str) -> LeaseOutcomes:
    """Return the outcome of one row that no worker finished."""
    packer = OutcomeWriter(np.empty(0, np.uint8))
    packer.add(Skipped(reason))
    return LeaseOutcomes(row, 1, memoryview(b"".join(packer.parts())))


def _lay(body: Memory | Pickled, memory: Memory) -> None:
    if isinstance(body, Pickled):
        body.write(memory)
    else:
        memory[:] = body


def _encode(outcome: object) -> tuple[PayloadKind, bytes, Memory | Pickled]:
    if isinstance(outcome, Pickled):
        return PayloadKind.OBJECT, b"", outcome
    if isinstance(outcome, AsObject):
        return PayloadKind.OBJECT, b"", Pickled.of(outcome.value)
    if isinstance(outcome, Skipped):
        return PayloadKind.SKIPPED, b"", _bytes_of(outcome.reason.encode())
    if isinstance(outcome, bytes | bytearray | memoryview):
        return PayloadKind.BYTES, b"", _bytes_of(outcome)
    if isinstance(outcome, np.ndarray) and len(form := _form(outcome)) <= _ENTRY["form"].itemsize:
        return PayloadKind.ARRAY, form, np.ascontiguousarray(outcome).reshape(-1).view(np.uint8)
    return PayloadKind.OBJECT, b"", Pickled.of(outcome)


def _decode(kind: PayloadKind, form: bytes, body: Memory, *, copied: bool) -> object:
    match kind:
        case PayloadKind.SKIPPED:
            return Skipped(body.tobytes().decode())
        case PayloadKind.BYTES:
            return memoryview(body.tobytes()) if copied else body.data
        case PayloadKind.ARRAY:
            dtype, _, shape = form.decode().partition(":")
            sides = [int(side) for side in shape.split(",") if side]
            return _usable(body, copied).view(dtype).reshape(sides)
        case PayloadKind.OBJECT:
            return unpickled(body, copied=copied)


def _form(array: npt.NDArray[Any]) -> bytes:
    """``<f4:3,224,224``; for arrays that only pickle can describe, a value too long to be used."""
    dtype = array.dtype
    if dtype.hasobject or dtype.fields is not None or not dtype.itemsize or type(array) is not np.ndarray:
        return bytes(_ENTRY["form"].itemsize + 1)
    return f"{dtype.str}:{','.join(map(str, array.shape))}".encode()


def _usable(body: Memory, copied: bool) -> Memory:
    if not copied and is_usable(body):
        return body
    fresh = aligned(body.size)
    fresh[:] = body
    return fresh


def _bytes_of(data: bytes | bytearray | memoryview) -> Memory:
    return np.frombuffer(data, np.uint8)
