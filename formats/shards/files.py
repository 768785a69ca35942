"""Reading a dataset's files: tables and other small files into memory, shards by position.

No file is memory-mapped: a map of a truncated file, or on a failing disk, kills the process (SIGBUS), and its
bytes can change after they were checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.runtime.files import OPEN_FLAGS, hash_file, naming, read_at, read_into
from shardprep.formats.runtime.owned import Descriptor, Owned
from shardprep.formats.runtime.seal import Seal

MAX_TABLE_BYTES = 16 << 30  # the index of 280 million records
READ_BYTES = 1 << 18  # fits the CPU's cache, for hashing

ARCHIVE_NAME = "archive.tar"  # in a dataset's folder: the archive, or a link to it

OUTPUT_FILES = re.compile(
    r"(shard|column-[A-Za-z0-9_.-]+)-\d{5,}\.(lmdb|h5|tar\.npy)|(index|boxes|column-[A-Za-z0-9_.-]+)\.npy|"
    r"(quarantine|provenance)\.json"
)
"""The names of the files that a conversion writes, except the manifest."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file in the manifest: its name, size in bytes, SHA-256 and number of rows or records."""

    name: str
    size: int
    sha256: str
    records: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "sha256": self.sha256, "records": self.records}

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has this file, with these bytes. Raises OSError."""
        path = folder / self.name
        try:
            has_size = not path.is_symlink() and path.stat().st_size == self.size
            return has_size and hash_file(path) == self.sha256
        except FileNotFoundError:
            return False


@contextmanager
def published_file(path: Path) -> Iterator[int]:
    """Open a file for reading. Raises ManifestDamaged if it is not a regular file; OSError with its name."""
    with naming(path):
        descriptor = os.open(path, OPEN_FLAGS)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a fifo would block
                raise ManifestDamaged("is not a regular file", path=path)
            yield descriptor
        finally:
            os.close(descriptor)


def read_small(path: Path, most: int) -> bytes:
    """Read a file. Raises ManifestDamaged if it is not regular or exceeds ``most`` bytes; OSError."""
    with published_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ManifestDamaged(f"has {size} bytes, more than the limit of {most}", path=path)
        return read_at(descriptor, size, 0)


def read_published(path: Path, entry: FileEntry, *, seal: str | None = None) -> npt.NDArray[np.uint8]:
    """Read a file that the manifest lists. Raises ManifestDamaged if its bytes differ; OSError.

    With ``seal``, the root of the manifest, a file that has a :class:`.Seal` is not hashed, and any other
    gets one.
    """
    if entry.size > MAX_TABLE_BYTES:
        raise ManifestDamaged(f"has {entry.size} bytes, more than any table", path=path)
    with published_file(path) as descriptor:
        status = os.fstat(descriptor)
        if status.st_size == entry.size:
            known = Seal(status, seal) if seal else None
            is_known = known is not None and known.holds
            data, digest = _read(descriptor, entry.size, hash_it=not is_known)
            if len(data) == entry.size and (is_known or digest == entry.sha256):
                if known and not is_known:
                    known.keep(os.fstat(descriptor))
                return data
    raise ManifestDamaged("is not the file that was published; prep repair rebuilds it", path=path)


def _read(descriptor: int, size: int, *, hash_it: bool) -> tuple[npt.NDArray[np.uint8], str]:
    """Return at most the first ``size`` bytes, and their SHA-256 with ``hash_it``."""
    data = np.empty(size, np.uint8)
    digest, whole, done = hashlib.sha256(), data.data, 0
    while done < size:
        part = whole[done : done + READ_BYTES]
        count = read_into(descriptor, part, done)
        if hash_it:
            digest.update(part[:count])
        done += count
        if count < len(part):
            break
    return data[:done], "sha256:" + digest.hexdigest()


class ShardFile(Owned):
    """A file read by position. ``size`` is its size when it was opened. Thread-safe.

    Raises OSError with the file's name, and ValueError once it is closed.
    """

    instead = "open the file again by its path"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = Descriptor(os.open(path, OPEN_FLAGS))
        self.number = self._descriptor.fileno()  # -1 once the file is closed
        with naming(path):
            self.size = os.fstat(self.number).st_size

    @property
    def is_deleted(self) -> bool:
        """Whether the file was deleted, and takes space only because it is open."""
        return os.fstat(self._open_number()).st_nlink == 0

    def read_at(self, length: int, offset: int) -> bytes:
        """Return ``length`` bytes from ``offset``, fewer only at the end of the file."""
        try:
            return read_at(self._open_number(), length, offset)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset``; return the number of bytes read, fewer only at the end."""
        try:
            return read_into(self._open_number(), memory, offset)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise

    def _open_number(self) -> int:
        if self.number < 0:
            raise ValueError(f"{self.path} is closed")
        return self.number

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.number = -1
        self._descriptor.close()


Rows = npt.NDArray[np.void]


def write_table(file: BinaryIO, rows: Rows) -> None:
    """Write a table as .npy version 1.0; its bytes depend only on the rows.

    ``np.save`` writes through C's stdio, and ignores disk errors.
    """
    file.write(table_header(rows.dtype, len(rows)))
    write_rows(file, rows)


def write_rows(file: BinaryIO, rows: Rows) -> None:
    """Write rows of a table, after its header or earlier rows."""
    file.write(np.ascontiguousarray(rows).tobytes())


def read_table(
    path: Path,
    entry: FileEntry,
    row_of: Callable[[int], np.dtype[np.void] | None],
    *,
    seal: str | None = None,
) -> Rows:
    """Read a table's rows into memory, read-only.

    ``row_of`` returns the dtype of a row of a given size in bytes, or None if there is none; the file must
    begin with the header for that dtype and number of rows. ``seal`` is as for :func:`.read_published`.
    Raises ManifestDamaged if the file differs from the manifest, or is not such a table; OSError.
    """
    data = read_published(path, entry, seal=seal)
    start = 10 + int.from_bytes(data[8:10].tobytes(), "little")
    body = data[start:]
    row = row_of(len(body) // max(1, entry.records))
    if (
        row is None
        or len(body) != row.itemsize * entry.records
        or data[:start].tobytes() != table_header(row, entry.records)
    ):
        raise ManifestDamaged(f"is not a table of {entry.records} rows in this format", path=path)
    rows = body.view(row)
    rows.flags.writeable = False
    return rows


def table_header(row: np.dtype[np.void], rows: int) -> bytes:
    described = {"descr": np.lib.format.dtype_to_descr(row), "fortran_order": False, "shape": (rows,)}
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()
