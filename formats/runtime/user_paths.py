"""Paths that users give, messages without the secrets in URLs, and the files of key pairs."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.files import OPEN_FLAGS, save_bytes
from shardprep.formats.runtime.owners import Descriptor
from shardprep.formats.runtime.progress import check_flags

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MISSPELT = re.compile(r"(s3|gs|az|https?|file):|[^/\s:@]+:[^/\s@]*@")
_SECRETS = re.compile(r"(?<=://)[^/?#\s]*@|[^/\s:@]+:[^/\s@]*@|[?#][^\s\"')>]*|;[^/\s=;]+=[^/\s\"')>]*")


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return the path with a leading ``~`` or ``~name`` expanded, unless there is no such user.

    Raises UsageError for an empty string (such as an unset variable), for a null character, for a URL, and
    for a misspelt URL, unless a file has that name.
    """
    if not isinstance(path, str | os.PathLike) or path == "" or "\0" in os.fsdecode(path):
        raise UsageError(f"a path is needed here, not {path!r}; '.' is the current folder")
    if isinstance(path, str) and (url := _URL.match(path)):  # the rest may contain a secret
        place = f"not a URL that begins with {url[0]} (prep fetch copies a dataset from there)"
        raise UsageError(f"a path on this machine is needed here, {place}")
    if isinstance(path, str) and _MISSPELT.match(path) and not os.path.lexists(path):
        raise UsageError(
            "looks like a misspelt URL: write SCHEME://PLACE/FOLDER with the credentials in the "
            "environment, or begin a path of this name with ./",
            path=redact(path),
        )
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def user_paths(paths: Iterable[str | os.PathLike[str]], name: str) -> list[Path]:
    """Return the paths of the argument ``name`` as :func:`user_path` does. Raises UsageError for one path."""
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):  # one path
        raise UsageError(f"{name} must be a list of paths, such as [{paths!r}]")
    return [user_path(path) for path in paths]


def caches_folder() -> Path:
    """Return the folder of this user's caches, which may not exist. Raises RuntimeError without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "shardprep"


def redact(text: str) -> str:
    """Return the text without the credentials, queries, fragments and parameters of its URLs.

    >>> redact("GET https://me:secret@host/train?sig=secret failed")
    'GET https://…@host/train?… failed'
    >>> redact("http:me:secret@host/train;token=secret")
    '…@host/train;…'
    """
    return _SECRETS.sub(lambda match: f"{match[0][0]}…" if match[0][0] in "?#;" else "…@", text)


MAX_KEY_FILE_BYTES = 1 << 14  # of a key file, which has about 300


@dataclass(frozen=True)
class KeyPair:
    """The two files of a key pair, and the public key's fingerprint, for comparing it by eye."""

    secret: Path
    public: Path
    fingerprint: str


def fingerprint(public: bytes) -> str:
    """Return 16 hexadecimal digits that identify a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def save_key_pair(secret: tuple[Path, bytes], public: tuple[Path, bytes], *, overwrite: bool) -> None:
    """Write both files of a key pair. Raises UsageError if one exists, unless it may be overwritten."""
    check_flags(overwrite=overwrite)
    for file, _ in (secret, public):
        if not overwrite and os.path.lexists(file):
            raise UsageError("exists already; choose another name, or overwrite it (--force)", path=file)
    # the public one first: if it cannot be written, an earlier secret key is still there
    save_bytes(*public, mode=0o644)
    save_bytes(*secret, mode=0o600)


def read_key_file(path: Path, advice: str) -> tuple[bytes, os.stat_result]:
    """Read a file, and return its status, too: it cannot be replaced between the two.

    Raises OperationError with the ``advice`` if it cannot be read, UsageError if it cannot be a key's.
    """
    try:
        descriptor = Descriptor(os.open(path, OPEN_FLAGS))
    except OSError as error:
        raise OperationError(f"{error.strerror}; {advice}", path=path) from None
    with closing(descriptor):
        status = os.fstat(descriptor.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("is not a regular file; name the key file itself", path=path)
        data = os.read(descriptor.fileno(), MAX_KEY_FILE_BYTES + 1)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise UsageError(f"has more than {MAX_KEY_FILE_BYTES} bytes, so it is not a key file", path=path)
    return data, status
