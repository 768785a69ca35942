"""A peer that speaks ZeroMQ's protocol (ZMTP 3.1, without keys) byte by byte, and so can misbehave."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT_S = 60.0
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
ZMTP_2_GREETING = SIGNATURE + b"\x01\x05"
ZMTP_2_ADDRESS = bytes(2)
MORE, LONG, COMMAND = 1, 2, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return bytes([flags, len(body)]) + body


PING = frame(b"\x04PING" + bytes(2), COMMAND)


def ready(kind: bytes) -> bytes:
    return frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind, COMMAND)


def address_of(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def read_frame(connection: socket.socket) -> bytes:
    """Return the body of the next frame."""
    flags = _read(connection, 1)[0]
    (length,) = struct.unpack(">Q", _read(connection, 8)) if flags & LONG else _read(connection, 1)
    return _read(connection, length)


def shake_hands(connection: socket.socket, kind: bytes) -> None:
    connection.settimeout(TIMEOUT_S)
    connection.sendall(GREETING + ready(kind))
    _read(connection, len(GREETING))
    read_frame(connection)


@contextmanager
def connected(endpoint: str) -> Iterator[socket.socket]:
    """A connection to a receiver, past the handshake."""
    with socket.create_connection(address_of(endpoint), TIMEOUT_S) as connection:
        shake_hands(connection, b"DEALER")
        yield connection


def reset(connection: socket.socket) -> None:
    """Close a connection by RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return data
