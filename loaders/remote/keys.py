"""Key files: a secret that stays on its machine, and a public half for the others, as ZeroMQ's tools write them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ...formats.archive_file import OPEN_FLAGS
from ...formats.errors import OperationError, UsageError
from ...formats.publish import flush_file

AnyPath = str | os.PathLike[str]

PRIVATE_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"
MAX_BYTES = 1 << 14  # of a key file, which has 300
KEY_BYTES = 32
OTHERS_READ = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
KEY = re.compile(rb'^[ \t]*(public|secret)-key[ \t]*=[ \t]*"([^"\n]*)"[ \t\r]*$', re.MULTILINE)

PRIVATE_NOTE = "The secret half of a key pair: never let it leave this machine, nor others read it."
PUBLIC_NOTE = "The public half of a key pair: for the machines that talk to the one that has the secret."


@dataclass(frozen=True)
class KeyPair:
    """Two files, and the fingerprint by which people can compare the public one over the telephone."""

    secret: Path
    public: Path
    fingerprint: str


@dataclass(frozen=True)
class Secret:
    """A secret key and its public half, each 40 characters; neither is in its repr."""

    secret: bytes = field(repr=False)
    public: bytes = field(repr=False)


def fingerprint(public: bytes) -> str:
    """16 hexadecimal digits that stand for a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def make_keys(path: AnyPath, *, overwrite: bool = False) -> KeyPair:
    """Make a new pair: ``PATH.key_secret``, which only this user may read, and ``PATH.key``; both are on disk then.

    ``zmq.auth.load_certificate`` reads both. Raises UsageError where one is there, unless ``overwrite``: then each
    is replaced in one step, and who knew the old public key must get the new one. Raises OSError.
    """
    _check_curve()
    secret_file, public_file = (_beside(path, suffix) for suffix in (PRIVATE_SUFFIX, PUBLIC_SUFFIX))
    for file in (secret_file, public_file):
        if not overwrite and os.path.lexists(file):
            raise UsageError("is there already; choose another name, or overwrite it (--force)", path=file)
    public, secret = zmq.curve_keypair()
    halves = [f'    public-key = "{public.decode()}"', f'    secret-key = "{secret.decode()}"']
    _write(secret_file, PRIVATE_NOTE, halves, mode=0o600, overwrite=overwrite)
    _write(public_file, PUBLIC_NOTE, halves[:1], mode=0o644, overwrite=overwrite)
    return KeyPair(secret_file, public_file, fingerprint(public))


def load_secret(path: AnyPath) -> Secret:
    """The secret key in a file that belongs to this user alone.

    Raises UsageError where it is another's, where group or others may read or write it, or where it holds no
    matching pair; OperationError where it cannot be read.
    """
    _check_curve()
    file = Path(path)
    is_public = file.suffix == PUBLIC_SUFFIX
    remedy = (
        f"the secret key is in the file that ends in {PRIVATE_SUFFIX}, not in" if is_public else "chmod 600"
    )
    keys = _keys_in(file, forbidden=OTHERS_READ, remedy=remedy, may_be_root_s=False)
    if "secret" not in keys:
        raise UsageError(f"holds no secret key; name the file that ends in {PRIVATE_SUFFIX}", path=file)
    if keys.get("public") != zmq.curve_public(keys["secret"]):
        raise UsageError("its two keys are not a pair; make new ones with prep keygen", path=file)
    return Secret(keys["secret"], keys["public"])


def load_public(path: AnyPath) -> bytes:
    """The public key in a file that only this user, or root, may write.

    Raises UsageError where others may, or where it holds none, or a secret one too, which should not have come
    here; OperationError where it cannot be read.
    """
    file = Path(path)
    keys = _keys_in(file, forbidden=OTHERS_WRITE, remedy="chmod go-w", may_be_root_s=True)
    if "secret" in keys:
        raise UsageError(
            f"holds a secret key, which must not leave its machine; put the file that ends in {PUBLIC_SUFFIX} "
            "here, and make new keys if this one has travelled",
            path=file,
        )
    if "public" not in keys:
        raise UsageError("holds no public key; copy it again from where prep keygen made it", path=file)
    return keys["public"]


def load_allowed(folder: AnyPath) -> dict[bytes, str]:
    """The public keys in the ``*.key`` files of a folder, each with the name of its file without ``.key``.

    Raises UsageError where there is none, where one cannot be used, or where others may write to the folder.
    """
    place = Path(folder)
    try:
        _check_owner(place, place.stat(), OTHERS_WRITE, "chmod go-w", may_be_root_s=True)
        files = sorted(f for f in place.iterdir() if f.suffix == PUBLIC_SUFFIX and f.name[0] != ".")
    except OSError as error:
        raise OperationError(f"{error.strerror}; name the folder of the allowed keys", path=place) from None
    if not files:
        raise UsageError(
            f"holds no public key, so nobody could come in; copy the data machines' *{PUBLIC_SUFFIX} files into it",
            path=place,
        )
    return {load_public(file): file.name.removesuffix(PUBLIC_SUFFIX) for file in reversed(files)}


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise OperationError("this pyzmq was built without CURVE; install the one from the package index")


def _beside(path: AnyPath, suffix: str) -> Path:
    name = os.fspath(path)
    file = Path(name + suffix)
    if file.name[0] == "." or name.endswith((PRIVATE_SUFFIX, PUBLIC_SUFFIX)):
        raise UsageError(
            f"{name!r} is no name for keys; {PRIVATE_SUFFIX} and {PUBLIC_SUFFIX} are added to it"
        )
    return file


def _write(path: Path, note: str, halves: list[str], *, mode: int, overwrite: bool) -> None:
    """Nobody finds it half-written, nor for a moment with another mode."""
    built = path.with_name(f".{path.name}.tmp") if overwrite else path
    if overwrite:
        built.unlink(missing_ok=True)
    descriptor = os.open(built, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write("\n".join([f"# {note}", "metadata", "curve", *halves, ""]))
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            built.replace(path)
    except BaseException:
        built.unlink(missing_ok=True)
        raise
    flush_file(path.parent)


def _keys_in(path: Path, *, forbidden: int, remedy: str, may_be_root_s: bool) -> dict[str, bytes]:
    """Of the file that is open, so that no other can take its place between the checks and the reading."""
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise OperationError(f"{error.strerror}; prep keygen makes keys", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("is not a regular file; name the key file itself", path=path)
        _check_owner(path, status, forbidden, remedy, may_be_root_s=may_be_root_s)
        return _parsed(os.read(descriptor, MAX_BYTES + 1), path)
    finally:
        os.close(descriptor)


def _parsed(data: bytes, path: Path) -> dict[str, bytes]:
    if len(data) > MAX_BYTES:
        raise UsageError(f"has more than {MAX_BYTES} bytes, so it is no key file", path=path)
    found = [(name.decode(), key) for name, key in KEY.findall(data)]
    if len(dict(found)) < len(found) or not all(_is_key(key) for _, key in found):
        raise UsageError("is damaged; copy it again, or make new keys with prep keygen", path=path)
    return dict(found)


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


def _check_owner(
    path: Path, status: os.stat_result, forbidden: int, remedy: str, *, may_be_root_s: bool
) -> None:
    if os.name != "posix":
        return
    if status.st_uid != os.geteuid() and not (may_be_root_s and status.st_uid == 0):
        raise UsageError(f"belongs to another user; chown {os.geteuid()} {path}", path=path)
    if status.st_mode & forbidden:
        raise UsageError(
            f"others may {'read' if forbidden & stat.S_IROTH else 'write to'} it, so its keys prove nothing; "
            f"{remedy} {path}",
            path=path,
        )
