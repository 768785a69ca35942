"""How the other end of a connection wants to be talked to, which ZeroMQ says in the first bytes of it (RFC 23)."""

from __future__ import annotations

import socket
from contextlib import suppress

from .endpoints import host_of

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
VERSION = b"\x03\x01"
MECHANISM = slice(12, 32)
GREETING_BYTES = 64
PATIENCE = 2.0


def mechanism_of(endpoint: str) -> str:
    """``"CURVE"`` with keys, ``"NULL"`` without; "" where within some seconds nobody greets as ZeroMQ does.

    What we want is left unsaid: who wants something else would hang up, perhaps before it has said so.
    """
    greeting = b""
    with suppress(OSError), _connected(endpoint) as connection:
        connection.sendall(SIGNATURE + VERSION)
        while len(greeting) < MECHANISM.stop and (came := connection.recv(GREETING_BYTES)):
            greeting += came
    name = greeting[MECHANISM].rstrip(b"\0") if greeting[:1] == SIGNATURE[:1] else b""
    return name.decode("ascii", "replace")


def _connected(endpoint: str) -> socket.socket:
    kind, _, place = endpoint.partition("://")
    if kind == "tcp":
        return socket.create_connection((host_of(endpoint), int(place.rpartition(":")[2])), PATIENCE)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    try:
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection
