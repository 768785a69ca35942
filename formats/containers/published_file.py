"""A file of a published dataset: read once into memory, and checked there.

It is not mapped: a map of a truncated file, or of a failing disk, kills the process (SIGBUS), and its
bytes can change after they were checked.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.system.atomic_write import hash_file
from shardprep.formats.system.positional import read_at, read_into
from shardprep.formats.system.regular_file import OPEN_FLAGS, naming
from shardprep.formats.system.seal import Seal

MAX_TABLE_BYTES = 16 << 30  # the index of 280 million records
READ_BYTES = 1 << 18  # fits the CPU's cache, so that hashing does not read from memory


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a dataset: name, size in bytes, SHA-256 and number of rows or records."""

    name: str
    size: int
    sha256: str
    records: int

    def to_json(self) -> dict[str, Any]:
        """The entry as the manifest holds it."""
        return {"name": self.name, "size": self.size, "sha256": self.sha256, "records": self.records}

    def is_in(self, folder: Path) -> bool:
        """Whether that folder has this file, with these bytes. Raises OSError."""
        path = folder / self.name
        try:
            has_size = not path.is_symlink() and path.stat().st_size == self.size
            return has_size and hash_file(path) == self.sha256
        except FileNotFoundError:
            return False


@contextmanager
def published_file(path: Path) -> Iterator[int]:
    """Open a file to read. Raises ManifestDamaged if it is not a regular file, and OSError with its name."""
    with naming(path):
        descriptor = os.open(path, OPEN_FLAGS)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a fifo would wait
                raise ManifestDamaged("is not a regular file", path=path)
            yield descriptor
        finally:
            os.close(descriptor)


def read_small(path: Path, most: int) -> bytes:
    """Read a file. Raises ManifestDamaged if it is not regular or has more than ``most`` bytes; OSError."""
    with published_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ManifestDamaged(f"has {size} bytes, more than the {most} that any such file has", path=path)
        return read_at(descriptor, size, 0)


def read_published(path: Path, entry: FileEntry, *, seal: str | None = None) -> npt.NDArray[np.uint8]:
    """Read a file that the manifest lists. Raises ManifestDamaged if its bytes differ from it; OSError.

    With ``seal``, the root of the manifest, a file with a :class:`.Seal` is not hashed; one that is hashed
    gets a seal.
    """
    if entry.size > MAX_TABLE_BYTES:
        raise ManifestDamaged(f"has {entry.size} bytes, more than any table has", path=path)
    with published_file(path) as descriptor:
        status = os.fstat(descriptor)
        if status.st_size == entry.size:
            known = Seal(status, seal) if seal else None
            is_known = known is not None and known.holds
            data, digest = _read(descriptor, entry.size, hashed=not is_known)
            if len(data) == entry.size and (is_known or digest == entry.sha256):
                if known and not is_known:
                    known.keep(os.fstat(descriptor))
                return data
    raise ManifestDamaged("is not the file that was published; prep repair rebuilds it", path=path)


def _read(descriptor: int, size: int, *, hashed: bool = True) -> tuple[npt.NDArray[np.uint8], str]:
    """Return the first ``size`` bytes, fewer if the file ends before, and their SHA-256 if it is wanted."""
    data = np.empty(size, np.uint8)
    digest, whole, done = hashlib.sha256(), data.data, 0
    while done < size:
        part = whole[done : done + READ_BYTES]
        count = read_into(descriptor, part, done)
        if hashed:
            digest.update(part[:count])
        done += count
        if count < len(part):
            break
    return data[:done], "sha256:" + digest.hexdigest()
