"""Key files in the format of ZeroMQ's tools, and the endpoints that may be used without keys."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import zmq
from zmq.utils import z85

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.files import OPEN_FLAGS, save_bytes, user_path
from shardprep.loaders.machines.socket import check_form

AnyPath = str | os.PathLike[str]

PRIVATE_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"
MAX_BYTES = 1 << 14  # of a key file, which has 300
KEY_BYTES = 32
OTHERS_READ = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
KEY = re.compile(rb'^[ \t]*(public|secret)-key[ \t]*=[ \t]*"([^"\n]*)"[ \t\r]*$', re.MULTILINE)

PRIVATE_NOTE = "The secret half of a key pair: keep it on this machine, and readable for its user only."
PUBLIC_NOTE = (
    "The public half of a key pair: copy it to the machines that connect to the one with the secret."
)


@dataclass(frozen=True)
class KeyPair:
    """The two files of a key pair, and the fingerprint of the public key, for comparing it by eye."""

    secret: Path
    public: Path
    fingerprint: str


@dataclass(frozen=True)
class Secret:
    """A secret key and its public key, of 40 characters each. Neither is in the repr."""

    secret: bytes = field(repr=False)
    public: bytes = field(repr=False)


def fingerprint(public: bytes) -> str:
    """Return 16 hexadecimal digits that identify a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def make_keys(path: AnyPath, *, overwrite: bool = False) -> KeyPair:
    """Make a key pair on disk: ``PATH.key_secret``, readable for this user only, and ``PATH.key``.

    ``zmq.auth.load_certificate`` reads both. Where a file exists, raises UsageError, or, with ``overwrite``,
    replaces it atomically; the other machines then need the new public key. Raises OperationError where
    something else than a file is there, OSError.
    """
    _check_curve()
    secret_file, public_file = (_beside(path, suffix) for suffix in (PRIVATE_SUFFIX, PUBLIC_SUFFIX))
    for file in (secret_file, public_file):
        if not overwrite and os.path.lexists(file):
            raise UsageError("exists already; choose another name, or overwrite it (--force)", path=file)
    public, secret = zmq.curve_keypair()
    halves = [f'    public-key = "{public.decode()}"', f'    secret-key = "{secret.decode()}"']
    save_bytes(secret_file, _lines_of(PRIVATE_NOTE, halves), mode=0o600, is_new=not overwrite)
    save_bytes(public_file, _lines_of(PUBLIC_NOTE, halves[:1]), mode=0o644, is_new=not overwrite)
    return KeyPair(secret_file, public_file, fingerprint(public))


def load_secret(path: AnyPath) -> Secret:
    """Return the secret key in a file that only this user may read.

    Raises UsageError where the file belongs to another user, where group or others may read or write it, or
    where it has no matching pair of keys; OperationError where it cannot be read.
    """
    _check_curve()
    file = user_path(path)
    remedy = "chmod 600"
    if file.suffix == PUBLIC_SUFFIX:
        remedy = f"the secret key is in the file that ends in {PRIVATE_SUFFIX}, not in"
    keys = _keys_in(file, forbidden=OTHERS_READ, remedy=remedy, root_may_own=False)
    if "secret" not in keys:
        raise UsageError(f"has no secret key; name the file that ends in {PRIVATE_SUFFIX}", path=file)
    if keys.get("public") != zmq.curve_public(keys["secret"]):
        raise UsageError("its two keys are not a pair; make new ones with prep keygen", path=file)
    return Secret(keys["secret"], keys["public"])


def load_public(path: AnyPath) -> bytes:
    """Return the public key in a file that only this user, or root, may write.

    Raises UsageError where others may write it, where it has no public key, or where it has a secret key,
    which must stay on its machine; OperationError where it cannot be read.
    """
    file = user_path(path)
    keys = _keys_in(file, forbidden=OTHERS_WRITE, remedy="chmod go-w", root_may_own=True)
    if "secret" in keys:
        raise UsageError(
            f"has a secret key, which must not leave its machine; put the file that ends in {PUBLIC_SUFFIX} "
            "here instead, and make new keys if this one was copied to another machine",
            path=file,
        )
    if "public" not in keys:
        raise UsageError("has no public key; copy it again from where prep keygen made it", path=file)
    return keys["public"]


def load_allowed(folder: AnyPath) -> dict[bytes, str]:
    """Return the public keys in the ``*.key`` files of a folder, each with its file's name without ``.key``.

    Raises UsageError where there is none, where one cannot be used, or where others may write to the folder.
    """
    place = user_path(folder)
    try:
        _check_owner(place, place.stat(), OTHERS_WRITE, "chmod go-w", root_may_own=True)
        files = sorted(f for f in place.iterdir() if f.suffix == PUBLIC_SUFFIX and f.name[0] != ".")
    except OSError as error:
        raise OperationError(f"{error.strerror}; name the folder of the allowed keys", path=place) from None
    if not files:
        raise UsageError(
            f"has no public key, so no sender could connect; copy the data machines' *{PUBLIC_SUFFIX} files into it",
            path=place,
        )
    return {load_public(file): file.name.removesuffix(PUBLIC_SUFFIX) for file in reversed(files)}


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise OperationError("this pyzmq was built without CURVE; install the one from the package index")


def _beside(path: AnyPath, suffix: str) -> Path:
    name = os.fspath(path)
    file = user_path(name + suffix)
    if file.name[0] == "." or name.endswith((PRIVATE_SUFFIX, PUBLIC_SUFFIX)):
        raise UsageError(
            f"{name!r} is not a name for keys; {PRIVATE_SUFFIX} and {PUBLIC_SUFFIX} are added to it"
        )
    return file


def _lines_of(note: str, halves: list[str]) -> bytes:
    return "\n".join([f"# {note}", "metadata", "curve", *halves, ""]).encode("ascii")


def _keys_in(path: Path, *, forbidden: int, remedy: str, root_may_own: bool) -> dict[str, bytes]:
    """Check and read one open file, so that it cannot be replaced between the two."""
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise OperationError(f"{error.strerror}; prep keygen makes keys", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("is not a regular file; name the key file itself", path=path)
        _check_owner(path, status, forbidden, remedy, root_may_own=root_may_own)
        return _parsed(os.read(descriptor, MAX_BYTES + 1), path)
    finally:
        os.close(descriptor)


def _parsed(data: bytes, path: Path) -> dict[str, bytes]:
    if len(data) > MAX_BYTES:
        raise UsageError(f"has more than {MAX_BYTES} bytes, so it is not a key file", path=path)
    found = [(name.decode(), key) for name, key in KEY.findall(data)]
    if len(dict(found)) < len(found) or not all(_is_key(key) for _, key in found):
        raise UsageError("is damaged; copy it again, or make new keys with prep keygen", path=path)
    return dict(found)


def _is_key(text: bytes) -> bool:
    with suppress(ValueError, KeyError, struct.error):
        return len(z85.decode(text)) == KEY_BYTES
    return False


def _check_owner(
    path: Path, status: os.stat_result, forbidden: int, remedy: str, *, root_may_own: bool
) -> None:
    if os.name != "posix":
        return
    if status.st_uid != os.geteuid() and not (root_may_own and status.st_uid == 0):
        raise UsageError(f"belongs to another user; chown {os.geteuid()} {path}", path=path)
    if status.st_mode & forbidden:
        raise UsageError(
            f"others may {'read' if forbidden & stat.S_IROTH else 'write to'} it, so its keys are not safe; "
            f"{remedy} {path}",
            path=path,
        )


@dataclass(frozen=True)
class ReceiverKeys:
    """The key files of a receiver: paths, read when a socket is opened. Picklable.

    ``secret`` is the receiver's own ``NAME.key_secret``, ``allowed`` a folder with the ``*.key`` files of the
    senders that are admitted.
    """

    secret: str | os.PathLike[str]
    allowed: str | os.PathLike[str]


@dataclass(frozen=True)
class SenderKeys:
    """The key files of a sender: paths, read when a socket is opened. Picklable.

    ``secret`` is the sender's own ``NAME.key_secret``, ``receiver`` the ``NAME.key`` of the receiver.
    """

    secret: str | os.PathLike[str]
    receiver: str | os.PathLike[str]


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
    with suppress(ValueError):
        if host == "localhost" or ip_address(host).is_loopback:
            return ""
    return (
        "other machines reach it, so it needs keys (keys=, or --key and --receiver), which prep keygen makes on each "
        "machine; without keys, use 127.0.0.1, or insecure=True (--insecure-plaintext) on a network that is secure"
    )


def _ipc_problem(path: Path) -> str:
    """Check every folder above the socket: a user that may rename one of them can replace the socket."""
    own = Path(os.path.realpath(path.parent))
    try:
        above = (_others_write(folder.stat(), sticky_is_safe=True) for folder in own.parents)
        if _others_write(own.stat()) or any(above):
            return f"others may write to {own} or above it; use a folder of your own (chmod 700)"
    except OSError as error:
        raise OperationError(f"{error.strerror}; make the folder first", path=path.parent) from None
    return ""


def _others_write(status: os.stat_result, *, sticky_is_safe: bool = False) -> bool:
    if status.st_uid not in (0, os.geteuid()):
        return True
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    return bool(status.st_mode & OTHERS_WRITE) and not (sticky_is_safe and is_sticky)
