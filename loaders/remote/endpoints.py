"""Which endpoints may be used without keys."""

from __future__ import annotations

import os
import stat
import warnings
from ipaddress import ip_address
from pathlib import Path

from ...formats.errors import OperationError, UsageError
from ..frame_socket import check_form
from .security import ReceiverKeys, SenderKeys

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class PlaintextWire(UserWarning):
    """A wire between machines has no keys: who reaches it can read and change everything on it."""


def check_endpoint(endpoint: str, keys: ReceiverKeys | SenderKeys | None, *, insecure: bool = False) -> None:
    """Without keys, let pass only what other machines and other users of this one cannot reach.

    That is ``tcp://`` on a loopback address (which other users of this machine do reach) and ``ipc://`` in a
    folder into which nobody else can write. Raises UsageError for anything else; with ``insecure`` it warns with
    PlaintextWire instead. Abstract ``ipc://@NAME``, which has no permissions, is always refused.
    """
    check_form(endpoint)
    kind, _, place = endpoint.partition("://")
    if kind == "ipc" and place[:1] in ("@", "*", ""):
        raise UsageError(f"{endpoint} lies in no folder; use ipc://PATH in a folder of your own")
    if keys is not None:
        return
    problem = _ipc_problem(Path(place)) if kind == "ipc" else _tcp_problem(endpoint)
    if problem and not insecure:
        raise UsageError(f"{endpoint}: {problem}")
    if problem:
        warnings.warn(
            f"{endpoint}: no keys, by your leave: who reaches it can read and change every batch",
            PlaintextWire,
            stacklevel=3,
        )


def host_of(endpoint: str) -> str:
    """The address or name in ``tcp://HOST:PORT``, without the brackets of IPv6."""
    return endpoint.partition("://")[2].rpartition(":")[0].strip("[]")


def _tcp_problem(endpoint: str) -> str:
    host = host_of(endpoint)
    try:
        is_loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if is_loopback:
        return ""
    return (
        "other machines reach it, so it needs keys: make them on each machine with prep keygen and give them as "
        "keys=; or stay on 127.0.0.1; or say insecure=True (--insecure-plaintext) where the network itself is secure"
    )


def _ipc_problem(path: Path) -> str:
    """Of every folder above it: who may rename one of them can put his own socket in our socket's place."""
    own = Path(os.path.realpath(path.parent))
    try:
        if _others_write(own.stat()) or any(
            _others_write(f.stat(), sticky_is_safe=True) for f in own.parents
        ):
            return f"others may write to {own} or above it; use a folder of your own (chmod 700)"
    except OSError as error:
        raise OperationError(f"{error.strerror}; make the folder first", path=path.parent) from None
    return ""


def _others_write(status: os.stat_result, *, sticky_is_safe: bool = False) -> bool:
    if status.st_uid not in (0, os.geteuid()):
        return True
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    return bool(status.st_mode & OTHERS_WRITE) and not (sticky_is_safe and is_sticky)
