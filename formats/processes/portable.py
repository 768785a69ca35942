"""Objects that can be sent to another process, as long as they are small."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

MOST_BYTES = 4 << 20


class _TooLarge(Exception):
    """The object takes more than MOST_BYTES, or names what only the main module defines."""


def packed(value: object) -> bytes | None:
    """Return the bytes of which :func:`unpacked` makes the object in a worker process.

    None for one that takes more than MOST_BYTES, cannot be pickled, or has classes or functions of the main
    module, which workers do not import.
    """
    file = _Bounded()
    try:
        _Packer(file).dump(value)
    except Exception:  # whatever its classes raise: it stays in this process
        return None
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the object of :func:`packed`, in a process of the same program."""
    return ForkingPickler.loads(data)


class _Bounded(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise _TooLarge
        return super().write(data)


class _Packer(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise _TooLarge
        return NotImplemented
