"""Any picklable value as one piece of memory, its arrays beside its pickle, each copied once each way.

A piece is the number of buffers, the pickle's size, where each buffer begins and its size, as 8 bytes each;
then the pickle; then the buffers, each on 64 bytes from the start. Between a process and its own children only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import ALIGNMENT, aligned, is_usable
from .trusted import dumps_beside, loads

Memory = npt.NDArray[np.uint8]

_HEAD = struct.Struct("<QQ")
_NUMBER = np.dtype("<u8")


@dataclass(frozen=True, eq=False)
class Pickled:
    """A value on its way: ``size`` bytes, which :meth:`write` lays out. Its arrays are not copied until then."""

    head: bytes
    stream: bytes
    buffers: list[tuple[int, memoryview]]
    size: int

    @classmethod
    def of(cls, value: object, *, copied: bool = False) -> Pickled:
        """Unless it is ``copied`` at once, the value must stay as it is until it is written.

        Raises whatever the value's class raises, when it cannot be pickled.
        """
        stream, beside = dumps_beside(value)
        if not beside:
            return cls(_HEAD.pack(0, len(stream)), stream, [], _HEAD.size + len(stream))
        raw = [memoryview(bytes(buffer.raw())) if copied else buffer.raw() for buffer in beside]
        end = _HEAD.size + 2 * _NUMBER.itemsize * len(raw) + len(stream)
        buffers: list[tuple[int, memoryview]] = []
        for view in raw:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            buffers.append((start, view))
            end = start + view.nbytes
        table = np.array([(start, view.nbytes) for start, view in buffers], _NUMBER).tobytes()
        return cls(_HEAD.pack(len(raw), len(stream)) + table, stream, buffers, end)

    def write(self, memory: Memory) -> None:
        """Lay the value out at the start of ``memory``."""
        whole = memory.data
        pieces: list[tuple[int, bytes | memoryview]] = [
            (0, self.head),
            (len(self.head), self.stream),
            *self.buffers,
        ]
        for start, piece in pieces:
            whole[start : start + len(piece)] = piece


def unpickled(memory: Memory, *, copied: bool) -> Any:
    """The value that was written there, its arrays writable: views of that memory, or ``copied``, as where it is no use."""
    count, length = _HEAD.unpack_from(memory.data)
    if not count:
        return loads(memory[_HEAD.size : _HEAD.size + length].data)
    copied = copied or not is_usable(memory)
    table = memory[_HEAD.size : _HEAD.size + 2 * _NUMBER.itemsize * count].view(_NUMBER).reshape(-1, 2)
    start = _HEAD.size + table.nbytes
    stream = memory[start : start + length].data
    return loads(stream, [_view(memory[a : a + size], copied) for a, size in table.tolist()])


def _view(memory: Memory, copied: bool) -> Memory:
    if not copied:
        return memory
    fresh = aligned(memory.size)
    fresh[:] = memory
    return fresh
