"""Key pairs as files: a secret half that only its user may read, and a public one."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.files import OPEN_FLAGS, save_bytes

MAX_BYTES = 1 << 14  # of a key file, which has about 300


@dataclass(frozen=True)
class KeyPair:
    """The two files of a key pair, and the public key's fingerprint, for comparing it by eye."""

    secret: Path
    public: Path
    fingerprint: str


def fingerprint(public: bytes) -> str:
    """Return 16 hexadecimal digits that identify a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def save_pair(secret: tuple[Path, bytes], public: tuple[Path, bytes], *, overwrite: bool) -> None:
    """Write both files of a key pair. Raises UsageError if one exists, unless it may be overwritten."""
    for file, _ in (secret, public):
        if not overwrite and os.path.lexists(file):
            raise UsageError("exists already; choose another name, or overwrite it (--force)", path=file)
    # the public one first: if it cannot be written, an earlier secret key is still there
    save_bytes(*public, mode=0o644)
    save_bytes(*secret, mode=0o600)


def read_key(path: Path, advice: str) -> tuple[bytes, os.stat_result]:
    """Read a file, and return its status, too: it cannot be replaced between the two.

    Raises OperationError with the ``advice`` if it cannot be read, UsageError if it cannot be a key's.
    """
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise OperationError(f"{error.strerror}; {advice}", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("is not a regular file; name the key file itself", path=path)
        data = os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise UsageError(f"has more than {MAX_BYTES} bytes, so it is not a key file", path=path)
    return data, status
