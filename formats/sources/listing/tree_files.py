"""The walk through folders of images, without following links."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.no_follow import open_below, open_folder, open_folder_below

from .source import ByteReader

T = TypeVar("T")

_IGNORED = {"Thumbs.db", "desktop.ini"}
_IS_LINK = "is a symbolic link, and only SOURCE itself may be one; put here what it points to"


_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


class FoundFile(NamedTuple):
    """A regular file: its path from the start of the walk (with ``/``), size, and mtime by ``mtime_of``."""

    path: str
    size: int
    mtime_ns: int


def mtime_of(status: os.stat_result) -> int:
    """Return a file's mtime in nanoseconds, modulo 2**64 as an int64, to compare: times after 2262 wrap."""
    return (status.st_mtime_ns + (1 << 63)) % (1 << 64) - (1 << 63)


def _scanned(top: Path, place: str, take: Callable[[os.DirEntry[str]], T]) -> list[T]:
    """Return ``take(entry)`` for each entry of a folder, by name, without hidden and file managers' files.

    ``place`` is the folder's path below ``top``. Raises SourceDamaged for fifos, sockets and devices, for
    names that are not UTF-8, and for links, including ``top`` and the folders between, even if they become
    links during the walk.
    """
    here = top / place
    try:
        folder = _opened(top, place)
        try:
            return [take(entry) for entry in _entries(folder, here)]
        finally:
            os.close(folder)
    except OSError as error:
        raise _failed(error, top, here) from error


def _opened(top: Path, place: str) -> int:
    folder = open_folder(top)
    if not place:
        return folder
    try:
        return open_folder_below(folder, os.fsencode(place))
    finally:
        os.close(folder)


def _entries(folder: int, here: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as scan:
        found = [entry for entry in scan if not entry.name.startswith(".") and entry.name not in _IGNORED]
    for entry in found:
        _check(entry, here)
    return sorted(found, key=lambda entry: entry.name)


def _failed(error: OSError, top: Path, here: Path) -> SourceDamaged | OSError:
    """Return the error for a folder that could not be listed."""
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        refuse_links(top.parent, here)
        return SourceDamaged(
            "is no longer a folder; let no other program write to it, and start again", path=here
        )
    return OSError(error.errno, error.strerror, str(here))


def refuse_links(top: Path, path: Path) -> None:
    """Raise SourceDamaged if ``path``, or a folder between ``top`` and it, is a link."""
    while path != top:
        if path.is_symlink():
            raise SourceDamaged(_IS_LINK, path=path)
        path = path.parent


def _check(entry: os.DirEntry[str], here: Path) -> None:
    if not entry.name.isascii() and not _is_utf8(entry.name):
        raise SourceDamaged(
            f"the name {os.fsencode(entry.name)!r} in this folder is not UTF-8; rename it", path=here
        )
    if entry.is_symlink():
        raise SourceDamaged(_IS_LINK, path=here / entry.name)
    if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
        raise SourceDamaged("is neither a file nor a folder; remove it", path=here / entry.name)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def folders_in(top: Path, place: str = "") -> list[str]:
    """Return the folders' names in the folder ``place`` below ``top``. Raises SourceDamaged, OSError."""
    return [name for name in _scanned(top, place, _folder_name) if name is not None]


def files_in(top: Path, place: str = "") -> Iterator[FoundFile]:
    """Return the files in the folder itself."""
    return (one for one in _scanned(top, place, _found) if isinstance(one, FoundFile))


def files_below(top: Path, place: str = "") -> Iterator[FoundFile]:
    """Yield the files in the folder and in all folders below it."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        for one in _scanned(top, f"{place}/{prefix}".strip("/"), _found):
            if isinstance(one, FoundFile):
                yield one._replace(path=prefix + one.path)
            else:
                waiting.append(f"{prefix}{one}/")


def _folder_name(entry: os.DirEntry[str]) -> str | None:
    return entry.name if entry.is_dir(follow_symlinks=False) else None


def _found(entry: os.DirEntry[str]) -> FoundFile | str:
    """Return a file, or a folder's name."""
    if entry.is_dir(follow_symlinks=False):
        return entry.name
    status = entry.stat(follow_symlinks=False)
    return FoundFile(entry.name, status.st_size, mtime_of(status))


@dataclass
class TreeReader(ByteReader):
    """Reader of the entries' files below ``root``, which must be unchanged since they were listed."""

    root: Path
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
            fd = open_below(self._fd.fileno(), entry["path"].item())
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
        if (status.st_size, mtime_of(status)) != (entry["length"], entry["mtime_ns"]):
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
