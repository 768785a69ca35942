"""A regular file that is read in place, by offset, and must not change."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardprep.formats.errors import SourceDamaged

from .descriptor import Descriptor
from .owned import Owned
from .positional import read_at

Item = TypeVar("Item")
Result = TypeVar("Result")

ReadAt = Callable[[int, int], bytes]
"""``read_at(length, offset)`` returns the bytes there, fewer only if the data ends before."""

# O_NONBLOCK: opening a fifo in place of a file must not wait.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set the file's name in an OSError from reading; Python sets it only when opening."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def open_regular(path: Path) -> int:
    """Open a regular file. Raises SourceDamaged, without waiting, if it is something else."""
    return regular(os.open(path, OPEN_FLAGS), path)


def regular(fd: int, path: Path) -> int:
    """Return a regular file's descriptor. For anything else, close it and raise SourceDamaged."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise SourceDamaged("is not a regular file; put the file itself there", path=path)


@dataclass(frozen=True, slots=True)
class Identity:
    """Size, mtime and inode, by which a changed file is recognised."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class ArchiveFile(Owned, AbstractContextManager["ArchiveFile"]):
    """A regular file open for reading by offset. Neither copyable nor picklable, not thread-safe.

    Entering raises SourceDamaged if the file is not the ``expected`` one; leaving raises it if the file was
    replaced or changed.
    """

    def __init__(self, path: Path, expected: Identity | None = None) -> None:
        self.path = path
        self._expected = expected
        self._fd = Descriptor(-1)

    def __enter__(self) -> ArchiveFile:
        self._fd = Descriptor(open_regular(self.path))
        self.identity = Identity.of(os.fstat(self._fd.fileno()))
        if self._expected not in (None, self.identity):
            self._fd.close()
            raise self._changed()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._fd.close()
        if kind is None and self._identity_now() != self.identity:
            raise self._changed()

    @property
    def end(self) -> int:
        """The file's size in bytes."""
        return self.identity.size

    def read_at(self, length: int, offset: int) -> bytes:
        """Read like :data:`ReadAt`. Raises OSError with the file's name."""
        with naming(self.path):
            return read_at(self._fd.fileno(), length, offset)

    def mapped(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield what the calls return, one after the other: a disk is not faster at several places."""
        return map(call, items)

    def expect_random_reads(self) -> None:
        """Keep the kernel from reading ahead: headers are 100 KB apart, and images are read later."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def _identity_now(self) -> Identity | None:
        try:
            return Identity.of(self.path.stat())
        except FileNotFoundError:
            return None

    def _changed(self) -> SourceDamaged:
        return SourceDamaged(
            "changed while it was read; let no other program write to it, and start again", path=self.path
        )
