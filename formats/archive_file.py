"""An archive that is read in place: by offset, and only while it stays the same file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import SourceDamaged

ReadAt = Callable[[int, int], bytes]
"""``read_at(length, offset)``: the bytes there, fewer only where the data ends."""

# A fifo in place of a file must be refused and not waited for.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError from reading say which file it was; Python tells that only of opening one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def open_regular(path: Path) -> int:
    """A descriptor to read from. Raises SourceDamaged, and waits for nobody, where it is no file."""
    fd = os.open(path, OPEN_FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise SourceDamaged("is not a regular file; put the file itself there", path=path)


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells that a file is still the one that was listed."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class ArchiveFile(AbstractContextManager["ArchiveFile"]):
    """A regular file open for reading by offset. Not picklable, not thread-safe.

    Entering raises SourceDamaged where the file is not the ``expected`` one; leaving does so where
    another one lies there now, or the same one changed.
    """

    def __init__(self, path: Path, expected: Identity | None = None) -> None:
        self.path = path
        self._expected = expected
        self._fd = -1

    def __enter__(self) -> ArchiveFile:
        self._fd = open_regular(self.path)
        self.identity = Identity.of(os.fstat(self._fd))
        if self._expected not in (None, self.identity):
            os.close(self._fd)
            raise self._changed()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        os.close(self._fd)
        if kind is None and self._identity_now() != self.identity:
            raise self._changed()

    @property
    def end(self) -> int:
        """The file's size in bytes."""
        return self.identity.size

    def read_at(self, length: int, offset: int) -> bytes:
        """A :data:`ReadAt`. Raises OSError that names the file."""
        try:
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            error.filename = str(self.path)
            raise
        if len(data) in (0, length):
            return data
        return data + self.read_at(length - len(data), offset + len(data))

    def expect_random_reads(self) -> None:
        """Keep the kernel from reading ahead: headers lie 100 KB apart, images are read later."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _identity_now(self) -> Identity | None:
        try:
            return Identity.of(self.path.stat())
        except FileNotFoundError:
            return None

    def _changed(self) -> SourceDamaged:
        return SourceDamaged(
            "changed while it was read; let no other program write to it, and start again", path=self.path
        )
