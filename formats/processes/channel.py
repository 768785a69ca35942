"""A channel of whole messages between two processes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from shardprep.formats.system.owned import Owned

Part = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 18
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Channel(Owned):
    """Whole messages over one end of a socket pair; another process has the other end.

    If the sender is killed or stopped in the middle of a message, no part of it is received, and no other
    channel is blocked. The pair has no name, so no other program can open it, and nothing can be left
    behind. An open channel does not mean that the other process runs: a process that either of the two
    forked keeps it open. Not thread-safe.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = bytearray()
        self._unsent = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once it is closed."""
        return self._end.fileno()

    def send(self, *parts: Part) -> None:
        """Send the parts as one message, and wait until it is sent. Raises OSError at a closed other end."""
        self._end.sendall(_joined(parts), _NO_SIGNAL)

    def post(self, *parts: Part) -> None:
        """Queue the parts as one message, which :meth:`flush` sends."""
        self._unsent += _joined(parts)

    def flush(self) -> bool:
        """Send queued bytes without waiting; return whether all are sent. Raises OSError as ``send`` does."""
        with suppress(BlockingIOError):
            while self._unsent:
                sent = self._end.send(self._unsent, socket.MSG_DONTWAIT | _NO_SIGNAL)
                del self._unsent[:sent]
        return not self._unsent

    def receive(self) -> bytes | None:
        """Wait for the next message and return it; None if the other end is closed."""
        while (message := self._next()) is None:
            if not self._read(0):
                return None
        return message

    def arrived(self) -> Iterator[bytes]:
        """Yield the received messages without waiting; ``ended`` is whether no more can come."""
        with suppress(BlockingIOError):
            while self._read(socket.MSG_DONTWAIT):
                while (message := self._next()) is not None:
                    yield message

    def finish(self) -> None:
        """Stop sending: the other end receives what was sent, then the end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()

    def __del__(self) -> None:
        if self.made_here:
            self._end.close()
        else:
            self._end.detach()

    def _read(self, flags: int) -> bool:
        try:
            piece = self._end.recv(_PIECE, flags)
        except ConnectionResetError:  # the other process ended before it read everything
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


def _joined(parts: tuple[Part, ...]) -> bytes:
    return b"".join((_LENGTH.pack(sum(len(part) for part in parts)), *parts))
