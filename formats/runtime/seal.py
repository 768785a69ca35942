"""Seals: records in the user's cache folder that a file was verified, so it need not be hashed again.

A seal holds while the file has the device, inode, size, mtime and ctime it had when it was verified. A change
within the clock's granularity would not change the times, so a file gets a seal only if its times are older
than YOUNG_NS. A damaged seal only costs a hash.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.errors import OperationError
from shardprep.formats.runtime.files import publish_bytes

LEAST_BYTES = 16 << 20  # fewer are hashed in 10 ms
YOUNG_NS = 2_000_000_000  # FAT has the coarsest timestamps, of two seconds


def seals_folder() -> Path:
    """Return the folder of this user's seals, in $XDG_CACHE_HOME or ~/.cache. It may not exist."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "shardprep/seals"


@dataclass(frozen=True)
class Seal:
    """The seal of a file verified against the digest ``root``; ``status`` is from before it was read."""

    status: os.stat_result
    root: str

    @property
    def holds(self) -> bool:
        """Whether the file was verified before against ``root``, and has not changed since."""
        with suppress(OSError, RuntimeError):
            return self._path.read_bytes() == self._text
        return False

    def keep(self, status: os.stat_result) -> bool:
        """Store the seal of a verified file; return whether that succeeded.

        ``status`` is the file's status after it was read. A file that changed in the meantime or just before
        gets no seal, nor does one smaller than LEAST_BYTES.
        """
        if self.status.st_size < LEAST_BYTES or self._is_young or Seal(status, self.root)._text != self._text:
            return False
        with suppress(OSError, RuntimeError, OperationError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            publish_bytes(self._path, self._text, self._path.parent)
            return True
        return False

    @property
    def _is_young(self) -> bool:
        """Whether a change now could leave the file's times unchanged; also true for future times."""
        return time.time_ns() - max(self.status.st_mtime_ns, self.status.st_ctime_ns) < YOUNG_NS

    @property
    def _path(self) -> Path:
        return seals_folder() / f"{self.status.st_dev:x}-{self.status.st_ino:x}.json"

    @property
    def _text(self) -> bytes:
        found = self.status
        numbers = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        return f"shardprep seal 1\n{self.root}\n{' '.join(map(str, numbers))}\n".encode()
