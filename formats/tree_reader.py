"""Images read from files in folders."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .archive_file import OPEN_FLAGS
from .errors import SourceDamaged
from .source import ByteReader

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


@dataclass
class TreeReader(ByteReader):
    """Reads the files that entries name below ``root``, which must stay those that were listed."""

    root: Path
    _fd: int | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> TreeReader:
        self._fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def read(self, entry: np.void) -> bytes:
        if self._fd is None:
            raise ValueError("the reader is closed")
        try:
            fd = os.open(entry["path"].item(), OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=self._fd)
        except OSError as error:
            raise self._failed(error, entry) from error
        try:
            return self._read(fd, entry)
        except OSError as error:
            raise self._failed(error, entry) from error
        finally:
            os.close(fd)

    def where(self, entry: np.void) -> str:
        return str(self.root / os.fsdecode(entry["path"].item()))

    def _read(self, fd: int, entry: np.void) -> bytes:
        pieces, missing = [], int(entry["length"])
        self._check(fd, entry)
        while missing and (piece := os.read(fd, missing)):
            pieces.append(piece)
            missing -= len(piece)
        self._check(fd, entry)
        if missing:
            raise self._changed(entry)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _check(self, fd: int, entry: np.void) -> None:
        status = os.fstat(fd)
        if (status.st_size, status.st_mtime_ns) != (entry["length"], entry["mtime_ns"]):
            raise self._changed(entry)

    def _changed(self, entry: np.void) -> SourceDamaged:
        return SourceDamaged(
            "changed while it was read; let no other program write to it, and start again",
            path=self.where(entry),
        )

    def _failed(self, error: OSError, entry: np.void) -> Exception:
        if error.errno in _GONE:
            return self._changed(entry)
        return OSError(error.errno, error.strerror, self.where(entry))
