"""How a thread hears of others: whole messages from one process, and a bell that anyone may ring."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

Part = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 18
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Channel:
    """Whole messages over one end of a socket pair, whose other end only one other process has.

    A message whose sender is killed half-way, or stopped, never arrives, not even in part, and holds up
    nobody else's. The pair has no name that a stranger could open or that could be left behind.
    Not thread-safe.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, *parts: Part) -> None:
        """Send the parts as one message, as there is room on the way. OSError if the other side is gone."""
        length = _LENGTH.pack(sum(len(part) for part in parts))
        self._end.sendall(b"".join((length, *parts)), _NO_SIGNAL)

    def receive(self) -> bytes | None:
        """Wait for the next message; None when the other side has ended."""
        while (message := self._next()) is None:
            if not self._read(0):
                return None
        return message

    def arrived(self) -> Iterator[bytes]:
        """The messages that are here, without waiting; ``ended`` tells whether more can come."""
        with suppress(BlockingIOError):
            while self._read(socket.MSG_DONTWAIT):
                while (message := self._next()) is not None:
                    yield message

    def finish(self) -> None:
        """Send no more: the other side receives what was sent, then the end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()

    def _read(self, flags: int) -> bool:
        try:
            piece = self._end.recv(_PIECE, flags)
        except ConnectionResetError:  # it ended without having read all that was sent to it
            piece = b""
        self._buffer += piece
        self.ended = not piece
        return not self.ended

    def _next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            message = bytes(view[_LENGTH.size : end])
        del self._buffer[:end]
        return message


class Bell:
    """Wakes a thread that waits for it in a selector.

    It may be rung from any thread and within a garbage collection: ringing takes no lock and never waits.
    It has no close: whoever may still ring it keeps it open, so that no byte goes to a number used anew.
    """

    def __init__(self) -> None:
        self._heard, self._rung = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(self._rung, False)

    def fileno(self) -> int:
        return self._heard

    def ring(self) -> None:
        with suppress(OSError):  # full, which is as good; or finalized before the ringer, in one garbage
            os.write(self._rung, b"\0")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._heard, 1 << 12)

    def __del__(self) -> None:
        os.close(self._heard)
        os.close(self._rung)
        self._heard = self._rung = -1
