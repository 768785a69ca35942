"""Key files in the format of ZeroMQ's tools, and authentication with and without keys."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from time import monotonic

import zmq
from zmq.utils import z85

from shardprep.formats.errors import OperationError, ShardprepError, UsageError
from shardprep.formats.runtime.progress import check_flags
from shardprep.formats.runtime.user_paths import KeyPair, fingerprint, read_key_file, save_key_pair, user_path
from shardprep.loaders.machines.socket import check_endpoint_form

AnyPath = str | os.PathLike[str]

PRIVATE_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"
KEY_BYTES = 32
OTHERS_READ = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
KEY = re.compile(rb'^[ \t]*(public|secret)-key[ \t]*=[ \t]*"([^"\n]*)"[ \t\r]*$', re.MULTILINE)

PRIVATE_NOTE = "The secret half of a key pair: keep it on this machine, and readable for its user only."
PUBLIC_NOTE = (
    "The public half of a key pair: copy it to the machines that connect to the one with the secret."
)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # begins ZeroMQ's greeting, before version and mechanism
MECHANISM = slice(12, 32)
HANDSHAKE_TIMEOUT_S = 2.0
MAX_FAILED_HANDSHAKES = 3  # in a row, with a peer that answers; a restart or a bad network causes fewer
LOOK_PAUSE_S = 0.1  # after a look: the events read then are of handshakes before it
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


@dataclass(frozen=True)
class Secret:
    """A secret key and its public key, 40 characters each. Neither is in the repr."""

    secret: bytes = field(repr=False)
    public: bytes = field(repr=False)


def make_keys(path: AnyPath, *, overwrite: bool = False) -> KeyPair:
    """Make a key pair on disk: ``PATH.key_secret``, readable by this user only, and ``PATH.key``.

    ``zmq.auth.load_certificate`` reads both. With ``overwrite``, replaces existing files atomically; the
    other machines then need the new public key. Raises UsageError if a file exists and may not be replaced,
    OperationError if something other than a file is there, OSError.
    """
    secret_file, public_file = (_key_path(path, suffix) for suffix in (PRIVATE_SUFFIX, PUBLIC_SUFFIX))
    public, secret = zmq.curve_keypair()
    halves = [f'    public-key = "{public.decode()}"', f'    secret-key = "{secret.decode()}"']
    both = ((secret_file, _key_text(PRIVATE_NOTE, halves)), (public_file, _key_text(PUBLIC_NOTE, halves[:1])))
    save_key_pair(*both, overwrite=overwrite)
    return KeyPair(secret_file, public_file, fingerprint(public))


def load_secret(path: AnyPath) -> Secret:
    """Return the secret key in a file that only this user may read.

    Raises UsageError if the file belongs to another user, if group or others may read or write it, or if it
    has no matching pair of keys; OperationError if it cannot be read.
    """
    file = user_path(path)
    keys, status = _read_keys(file)
    if "secret" not in keys:
        raise UsageError(f"has no secret key; name the file that ends in {PRIVATE_SUFFIX}", path=file)
    _check_access(file, status, is_secret=True)
    if keys.get("public") != zmq.curve_public(keys["secret"]):
        raise UsageError("its two keys are not a pair; make new ones with prep keygen", path=file)
    return Secret(keys["secret"], keys["public"])


def load_public(path: AnyPath) -> bytes:
    """Return the public key in a file that only this user, or root, may write.

    Raises UsageError if others may write it, if it has no public key, or if it has a secret key, which must
    stay on its machine; OperationError if it cannot be read.
    """
    file = user_path(path)
    keys, status = _read_keys(file)
    _check_access(file, status)
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

    Raises UsageError if there is none, if one cannot be used, or if others may write to the folder.
    """
    place = user_path(folder)
    try:
        _check_access(place, place.stat())
        files = sorted(f for f in place.iterdir() if f.suffix == PUBLIC_SUFFIX and f.name[0] != ".")
    except OSError as error:
        raise OperationError(f"{error.strerror}; name the folder of the allowed keys", path=place) from None
    if not files:
        raise UsageError(
            f"has no public key, so no sender could connect; copy the data machines' *{PUBLIC_SUFFIX} files into it",
            path=place,
        )
    return {load_public(file): file.name.removesuffix(PUBLIC_SUFFIX) for file in reversed(files)}


def _key_path(path: AnyPath, suffix: str) -> Path:
    name = os.fspath(path)
    file = user_path(name + suffix)
    if file.name[0] == "." or name.endswith((PRIVATE_SUFFIX, PUBLIC_SUFFIX)):
        raise UsageError(
            f"{name!r} is not a name for keys; {PRIVATE_SUFFIX} and {PUBLIC_SUFFIX} are added to it"
        )
    return file


def _key_text(note: str, halves: list[str]) -> bytes:
    return "\n".join([f"# {note}", "metadata", "curve", *halves, ""]).encode("ascii")


def _read_keys(path: Path) -> tuple[dict[str, bytes], os.stat_result]:
    """Return the keys in a file, and its status."""
    data, status = read_key_file(path, "prep keygen makes keys")
    pairs = [(name.decode(), key) for name, key in KEY.findall(data)]
    if len(dict(pairs)) < len(pairs) or not all(_is_key(key) for _, key in pairs):
        raise UsageError("is damaged; copy it again, or make new keys with prep keygen", path=path)
    return dict(pairs), status


def _is_key(text: bytes) -> bool:
    with suppress(ValueError, KeyError, struct.error):
        return len(z85.decode(text)) == KEY_BYTES
    return False


def _check_access(path: Path, status: os.stat_result, *, is_secret: bool = False) -> None:
    """Check that others may not write and, if the file is secret, not read. Root may own public keys."""
    if status.st_uid != os.geteuid() and (is_secret or status.st_uid):
        raise UsageError(f"belongs to another user; chown {os.geteuid()} {path}", path=path)
    if status.st_mode & (OTHERS_READ if is_secret else OTHERS_WRITE):
        remedy = "chmod 600" if is_secret else "chmod go-w"
        raise UsageError(f"others have access to it, so its keys are not safe; {remedy} {path}", path=path)


@dataclass(frozen=True)
class ReceiverKeys:
    """Paths of a receiver's key files, which are read when a socket is opened. Picklable.

    ``secret`` is the receiver's own ``NAME.key_secret``, ``allowed`` a folder with the ``*.key`` files of the
    admitted senders.
    """

    secret: str | os.PathLike[str]
    allowed: str | os.PathLike[str]


@dataclass(frozen=True)
class SenderKeys:
    """Paths of a sender's key files, which are read when a socket is opened. Picklable.

    ``secret`` is the sender's own ``NAME.key_secret``, ``receiver`` the ``NAME.key`` of the receiver.
    """

    secret: str | os.PathLike[str]
    receiver: str | os.PathLike[str]


class PlaintextWire(UserWarning):
    """An endpoint without keys is reachable by others, who can read and change everything."""


def check_endpoint(endpoint: str, keys: ReceiverKeys | SenderKeys | None, *, insecure: bool = False) -> None:
    """Check that an endpoint without keys is out of reach of other machines and, if possible, other users.

    Without keys, ``tcp://`` must be on loopback, and ``ipc://`` in a folder that only this user can write to.
    Raises UsageError for other endpoints, or warns with PlaintextWire if ``insecure``. ``ipc://@NAME``, which
    has no permissions, is always refused.
    """
    check_flags(insecure=insecure)
    check_endpoint_form(endpoint)
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
    """Return the host in ``tcp://HOST:PORT``, without the brackets of IPv6 and a source address."""
    return re.split("://|;", endpoint)[-1].rpartition(":")[0].strip("[]")


def _tcp_problem(endpoint: str) -> str:
    host = host_of(endpoint)
    with suppress(ValueError):
        if host == "localhost" or ip_address(host).is_loopback:
            return ""
    return (
        "other machines can reach it, so it needs keys (keys=, or --key and --receiver), which prep keygen makes on each "
        "machine; without keys, use 127.0.0.1, or insecure=True (--insecure-plaintext) on a network that is secure"
    )


def _ipc_problem(path: Path) -> str:
    """Check every folder above the socket: whoever may rename one of them can replace the socket."""
    own = Path(os.path.realpath(path.parent))
    try:
        above = (_is_writable_by_others(folder.stat(), sticky_is_safe=True) for folder in own.parents)
        if _is_writable_by_others(own.stat()) or any(above):
            return f"others may write to {own} or above it; use a folder of your own (chmod 700)"
    except OSError as error:
        raise OperationError(f"{error.strerror}; make the folder first", path=path.parent) from None
    return ""


def _is_writable_by_others(status: os.stat_result, *, sticky_is_safe: bool = False) -> bool:
    if status.st_uid not in (0, os.geteuid()):
        return True
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    return bool(status.st_mode & OTHERS_WRITE) and not (sticky_is_safe and is_sticky)


class ReceiverAuth:
    """Authenticates the peers of a receiver's socket. Thread-safe.

    With ``keys``, only peers that prove possession of an allowed key are admitted, over an encrypted
    connection; no data of other peers reaches the process. Without, every peer is admitted. Raises UsageError
    or OperationError if the key files cannot be used.
    """

    def __init__(self, keys: ReceiverKeys | None) -> None:
        if not isinstance(keys, ReceiverKeys | None):
            raise UsageError(f"keys must be ReceiverKeys(secret, allowed), not {keys!r}")
        self._keys = keys
        self._secret = load_secret(keys.secret) if keys else None
        self._names: dict[str, str] = {}  # of the allowed public keys
        self.refused = 0  # peers
        self._connected = 0  # peers whose handshake has ended, perhaps with a counted refusal
        self.reload()

    def reload(self) -> None:
        """Read the allow-list again. If it cannot be used, raises and keeps the old one.

        A peer with a removed key stays connected, so check each message with :meth:`admits`.
        """
        if self._keys:
            try:
                allowed = load_allowed(self._keys.allowed)
            except ShardprepError as error:
                remedy = "; until then the old allow-list applies (close the receiver to refuse all)"
                error.message += remedy if self._names else ""
                raise
            self._names = {public.decode(): name for public, name in allowed.items()}

    def admits(self, user: str) -> bool:
        """Return whether the current allow-list has the key of a peer, its :attr:`.Message.user`."""
        return self._keys is None or user in self._names

    def name_of(self, user: str) -> str:
        """Return the name of the user's key file without ``.key``, "" if it is not in the list."""
        return self._names.get(user, "")

    def note_event(self, event: int) -> None:
        """Count refused peers. One thread must pass every event of the socket, in order."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED or event in FAILED_HANDSHAKES:
            self._connected += 1
            self.refused += event in FAILED_HANDSHAKES
        elif event == zmq.EVENT_DISCONNECTED:
            if self._connected:
                self._connected -= 1
            else:
                self.refused += 1  # another protocol, for which libzmq reports no other event

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        if self._secret is None:
            return
        handler = context.socket(zmq.REP)
        handler.setsockopt(zmq.LINGER, 0)
        handler.bind(ZAP_ENDPOINT)
        threading.Thread(target=self._authenticate, args=[handler], name="shardprep-zap", daemon=True).start()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def _authenticate(self, handler: zmq.Socket[bytes]) -> None:
        """Authenticate peers until the context is terminated. libzmq refuses peers without an answer."""
        try:
            while True:
                _, number, _, _, _, mechanism, *credentials = handler.recv_multipart()
                user = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
                is_admitted = user.decode() in self._names
                code, text = (b"200", b"admitted") if is_admitted else (b"400", b"not admitted")
                handler.send_multipart([ZAP_VERSION, number, code, text, user, b""])
        except zmq.ContextTerminated:
            pass
        finally:
            handler.close()


def fetch_greeting(endpoint: str) -> bytes:
    """Return the first bytes that the process at an endpoint sends to a peer that gives no mechanism.

    A receiver with another mechanism would close the connection, perhaps before its greeting.
    """
    kind, _, place = endpoint.partition("://")
    family = socket.AF_UNIX if kind == "ipc" else socket.AF_INET6 if "[" in place else socket.AF_INET
    with suppress(OSError), socket.socket(family) as connection:
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        connection.connect(place if kind == "ipc" else (host_of(endpoint), int(place.rpartition(":")[2])))
        connection.sendall(SIGNATURE + b"\x03\x01")
        return connection.makefile("rb").read(MECHANISM.stop)
    return b""


class NotAdmitted(OperationError):
    """The receiver does not admit this sender: its key is missing, or not in the allow-list."""


class WrongReceiver(OperationError):
    """The process at the endpoint does not prove possession of the receiver's key, or is not a receiver."""


class SenderAuth:
    """Authenticates a sender's connection, and raises if connecting cannot succeed. Not thread-safe.

    libzmq alone reconnects forever, or, after a plain refusal, never. A receiver that is absent is not an
    error. Raises UsageError or OperationError if the key files cannot be used.
    """

    def __init__(self, endpoint: str, keys: SenderKeys | None) -> None:
        if not isinstance(keys, SenderKeys | None):
            raise UsageError(f"keys must be SenderKeys(secret, receiver), not {keys!r}")
        self._endpoint = endpoint
        self._keys = keys
        self._secret = load_secret(keys.secret) if keys else None
        self._receiver = load_public(keys.receiver) if keys else b""
        self._last_event = self._failed_handshakes = 0  # the latter in a row
        self._last_look = 0.0  # when the reason was last sought

    def note_event(self, event: int) -> None:
        """Handle an event of the socket. The caller must pass every event, in order.

        Raises NotAdmitted or WrongReceiver, after which the socket cannot be used. After a failed handshake,
        it opens another connection, for a few seconds at most, to find the reason.
        """
        before, self._last_event = self._last_event, event
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._keys:
            own = Path(self._keys.secret).with_suffix(PUBLIC_SUFFIX).name
            raise NotAdmitted(
                f"{self._endpoint}: the receiver there does not know this machine's key; add {own} to its allow-list"
            )
        refusals = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED
        is_refused = before == zmq.EVENT_CONNECTED and event in refusals  # libzmq does not connect again
        has_failed = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if is_refused or (has_failed and monotonic() > self._last_look + LOOK_PAUSE_S):
            self._raise_reason(is_refused)
            self._last_look = monotonic()

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._receiver)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def _raise_reason(self, is_refused: bool) -> None:
        """Raise NotAdmitted or WrongReceiver, unless nothing answers, as at a tunnel without a receiver."""
        greeting = fetch_greeting(self._endpoint)
        self._failed_handshakes = self._failed_handshakes + 1 if greeting else 0
        if not is_refused and self._failed_handshakes < MAX_FAILED_HANDSHAKES:
            return
        has_keys = greeting[MECHANISM].rstrip(b"\0") == b"CURVE"
        if has_keys and self._keys:
            raise WrongReceiver(
                f"{self._endpoint}: the receiver there has a different key from {Path(self._keys.receiver).name}; copy "
                f"its current {PUBLIC_SUFFIX} file here"
            )
        if has_keys:
            raise NotAdmitted(
                f"{self._endpoint}: the receiver there needs a key; make one with prep keygen, add it to the "
                "receiver's allow-list and give it here as keys= (--key and --receiver)"
            )
        if greeting.startswith(SIGNATURE[:1]) and self._keys:
            raise WrongReceiver(
                f"{self._endpoint}: the receiver there has no keys, so it cannot prove its identity; give it keys"
            )
        if is_refused or not SIGNATURE.startswith(greeting[:1]):
            raise WrongReceiver(f"{self._endpoint}: the peer there is not a receiver; check the address")
