"""The reader of the files below a folder."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.no_follow import open_below
from shardprep.formats.system.regular_file import OPEN_FLAGS

from .source import ByteReader
from .tree_files import mtime_of

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


@dataclass
class TreeReader(ByteReader):
    """Reader of the entries' files below ``root``, which must be unchanged since they were listed.

    With ``follow_symlinks``, a link in the path of a file is followed; without it, that file has changed.
    ``columns`` are those of the entries with a file's path below ``root``, its size and its time.
    """

    root: Path
    follow_symlinks: bool = False
    columns: tuple[str, str, str] = ("path", "length", "mtime_ns")
    _fd: Descriptor | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> TreeReader:
        self._fd = Descriptor(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            self._fd.close()
            self._fd = None

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def read(self, entry: np.void) -> bytes:
        if self._fd is None:
            raise ValueError("the reader is closed")
        try:
            fd = self._opened(self._fd.fileno(), entry[self.columns[0]].item())
        except OSError as error:
            raise self._failed(error, entry) from error
        try:
            return self._read(fd, entry)
        except OSError as error:
            raise self._failed(error, entry) from error
        finally:
            os.close(fd)

    def _opened(self, folder: int, place: bytes) -> int:
        return (
            os.open(place, OPEN_FLAGS, dir_fd=folder) if self.follow_symlinks else open_below(folder, place)
        )

    def where(self, entry: np.void) -> str:
        return str(self.root / os.fsdecode(entry[self.columns[0]].item()))

    def _read(self, fd: int, entry: np.void) -> bytes:
        pieces, missing = [], int(entry[self.columns[1]])
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
        _, size, time = self.columns
        if (status.st_size, mtime_of(status)) != (entry[size], entry[time]):
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
