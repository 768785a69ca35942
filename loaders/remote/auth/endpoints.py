"""The endpoints that may be used without keys."""

from __future__ import annotations

import os
import stat
import warnings
from ipaddress import ip_address
from pathlib import Path

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.frames.frame_socket import check_form

from .keys import ReceiverKeys, SenderKeys

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class PlaintextWire(UserWarning):
    """An endpoint that others reach has no keys: they can read and change everything."""


def check_endpoint(endpoint: str, keys: ReceiverKeys | SenderKeys | None, *, insecure: bool = False) -> None:
    """Check that other machines, and where possible other users, do not reach an endpoint without keys.

    Without keys, ``tcp://`` must be on a loopback address (which other users of this machine do reach), and
    ``ipc://`` in a folder that only this user can write to. Raises UsageError for anything else, or warns
    with PlaintextWire where ``insecure``. Abstract ``ipc://@NAME``, which has no permissions, is always
    refused.
    """
    check_form(endpoint)
    kind, _, place = endpoint.partition("://")
    if kind == "ipc" and place[:1] in ("@", "*", ""):
        raise UsageError(f"{endpoint} is not in a folder; use ipc://PATH in a folder of your own")
    if keys is not None:
        return
    problem = _ipc_problem(Path(place)) if kind == "ipc" else _tcp_problem(endpoint)
    if problem and not insecure:
        raise UsageError(f"{endpoint}: {problem}")
    if problem:
        warnings.warn(
            f"{endpoint}: no keys: any program that reaches it can read and change every batch",
            PlaintextWire,
            stacklevel=3,
        )


def host_of(endpoint: str) -> str:
    """Return the address or name in ``tcp://HOST:PORT``, without the brackets of IPv6."""
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
        "keys=; or stay on 127.0.0.1; or give insecure=True (--insecure-plaintext) where the network itself is secure"
    )


def _ipc_problem(path: Path) -> str:
    """Check every folder above the socket: a user that may rename one of them can replace the socket."""
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
