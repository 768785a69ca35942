"""What shows that a store has the same bytes as a local file."""

from __future__ import annotations

import hashlib


class Fingerprint:
    """The SHA-256 of a file, and the ETags that stores give to these bytes, from its parts in order.

    S3, and most stores with its interface, give the MD5 of the file, or of a file that came in parts the MD5
    of the MD5s of these and their number. Others, and buckets with keys of KMS, give something else.
    """

    def __init__(self) -> None:
        self.size = 0
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._md5_of_parts = hashlib.md5(usedforsecurity=False)
        self._parts = 0

    def add(self, part: bytes) -> None:
        """Add the next part."""
        self.size += len(part)
        self._parts += 1
        self._sha256.update(part)
        self._md5.update(part)
        self._md5_of_parts.update(hashlib.md5(part, usedforsecurity=False).digest())

    @property
    def sha256(self) -> str:
        """The digest of all parts."""
        return f"sha256:{self._sha256.hexdigest()}"

    @property
    def e_tags(self) -> tuple[str, str]:
        """The ETags that show these bytes: of the file as a whole, and in these parts."""
        return self._md5.hexdigest(), f"{self._md5_of_parts.hexdigest()}-{self._parts}"
