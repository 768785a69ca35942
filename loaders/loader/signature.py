"""Signatures of run logs: Ed25519 by ``cryptography``, with keys as PEM files that OpenSSL can read.

A signature is the last line of a log, and signs the bytes of all lines above it.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardprep.formats.errors import DataError, MissingExtra, UsageError
from shardprep.formats.runtime.user_paths import KeyPair, fingerprint, read_key_file, save_key_pair, user_path

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
        load_pem_public_key,
    )
except ImportError as error:
    raise MissingExtra.of("a signature", "cryptography", "signing") from error

VERSION = 1
FORMAT = "shardprep signature"
PRIVATE_SUFFIX = ".pem"
PUBLIC_SUFFIX = ".pub.pem"


def make_signing_keys(path: str | os.PathLike[str], *, overwrite: bool = False) -> KeyPair:
    """Make a pair of Ed25519 keys on disk: ``PATH.pem``, readable by this user only, and ``PATH.pub.pem``.

    Args:
        path: The files' common path, without suffix.
        overwrite: Whether to replace existing files.

    Raises:
        UsageError: A file exists, and ``overwrite`` is False.
        OperationError: A path exists that is not a file.
        OSError: A file cannot be written.
    """
    name = os.fspath(path)
    secret, public = (user_path(name + suffix) for suffix in (PRIVATE_SUFFIX, PUBLIC_SUFFIX))
    key = Ed25519PrivateKey.generate()
    public_half = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    secret_half = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    save_key_pair((secret, secret_half), (public, public_half), overwrite=overwrite)
    return KeyPair(secret, public, fingerprint(key.public_key().public_bytes_raw()))


@dataclass(frozen=True)
class Signature:
    """An Ed25519 signature of RFC 8032, 64 bytes, and the ``public`` key that checks it, 32 bytes."""

    public: bytes
    signature: bytes

    @classmethod
    def of(cls, data: bytes, key: str | os.PathLike[str]) -> Signature:
        """Sign bytes with the secret key in a file.

        Raises OperationError if the file cannot be read, and UsageError if it holds no such key or others may
        read it.
        """
        file, load = user_path(key), partial(load_pem_private_key, password=None)
        secret, mode = _load_key(
            file, load, Ed25519PrivateKey, "secret", f"{PRIVATE_SUFFIX}, not in {PUBLIC_SUFFIX}"
        )
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(f"other users can read it, so it is not secret; chmod 600 {file}", path=file)
        return cls(secret.public_key().public_bytes_raw(), secret.sign(data))

    @classmethod
    def from_line(cls, line: bytes) -> Signature:
        """Parse a log's last line. Raises DataError unless it is as :meth:`line` writes it."""
        try:
            value = json.loads(line)
            signature = cls(*(base64.b64decode(value[name]) for name in ("public_key", "signature")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError("has lines after its signature, or a damaged one; sign it again") from error
        if signature.line() != line:
            raise DataError("was changed: its signature has another form")
        return signature

    def check(self, data: bytes) -> None:
        """Raise DataError unless the key signed these bytes."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(self.signature, data)
        except (InvalidSignature, ValueError) as error:
            raise DataError("was changed: its signature does not match") from error

    def line(self) -> bytes:
        """Return the last line of a signed log."""
        parts = {"public_key": self.public, "signature": self.signature}
        texts = {name: base64.b64encode(part).decode() for name, part in parts.items()}
        return json.dumps({"format": FORMAT, "version": VERSION} | texts).encode() + b"\n"


def load_public_key(path: str | os.PathLike[str]) -> bytes:
    """Return the 32 bytes of a public key's file. Raises OperationError, UsageError if it has none."""
    key, _ = _load_key(user_path(path), load_pem_public_key, Ed25519PublicKey, "public", PUBLIC_SUFFIX)
    found: bytes = key.public_bytes_raw()
    return found


def _load_key(
    file: Path, load: Callable[[bytes], object], kind: type, half: str, suffix: str
) -> tuple[Any, int]:
    """Return the key of this kind in a file, and the file's mode."""
    data, status = read_key_file(file, "prep keygen --signing makes keys")
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        if isinstance(key := load(data), kind):
            return key, status.st_mode
    raise UsageError(
        f"is not the {half} half of Ed25519 keys without a password; name a file that prep keygen --signing wrote "
        f"and that ends in {suffix}",
        path=file,
    )
