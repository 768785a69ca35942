"""Folders of images, walked without following a link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import SourceDamaged

_LITTER = {"Thumbs.db", "desktop.ini"}
_IS_LINK = "is a symbolic link, and only SOURCE itself may be one; put here what it points to"


class FoundFile(NamedTuple):
    """A regular file: its path relative to where the walk began (with ``/``), and its status."""

    path: str
    size: int
    mtime_ns: int


def list_folder(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; what file managers leave (``.*``, Thumbs.db, desktop.ini) is not.

    Raises SourceDamaged for links, fifos, sockets and devices, and for names that are not UTF-8.
    """
    if Path(folder).is_symlink():
        raise SourceDamaged(_IS_LINK, path=folder)
    with os.scandir(folder) as scan:
        found = [entry for entry in scan if not entry.name.startswith(".") and entry.name not in _LITTER]
    for entry in found:
        _check(entry)
    return sorted(found, key=lambda entry: entry.name)


def refuse_links(top: Path, path: Path) -> None:
    """Raises SourceDamaged where ``path``, or a folder on the way to it from ``top``, is a link."""
    while path != top:
        if path.is_symlink():
            raise SourceDamaged(_IS_LINK, path=path)
        path = path.parent


def _check(entry: os.DirEntry[str]) -> None:
    if not entry.name.isascii() and not _is_utf8(entry.name):
        raise SourceDamaged(
            f"the name {os.fsencode(entry.name)!r} in this folder is not UTF-8; rename it",
            path=Path(entry.path).parent,
        )
    if entry.is_symlink():
        raise SourceDamaged(_IS_LINK, path=entry.path)
    if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
        raise SourceDamaged("is neither a file nor a folder; take it away", path=entry.path)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def folders_in(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the folders in a folder."""
    return [entry.name for entry in list_folder(folder) if entry.is_dir(follow_symlinks=False)]


def files_in(folder: str | os.PathLike[str]) -> Iterator[FoundFile]:
    """The files that lie in the folder itself."""
    for entry in list_folder(folder):
        if entry.is_file(follow_symlinks=False):
            yield _found(entry, entry.name)


def files_below(folder: str | os.PathLike[str]) -> Iterator[FoundFile]:
    """The files in the folder and in all folders below it."""
    waiting = [(os.fspath(folder), "")]
    while waiting:
        here, prefix = waiting.pop()
        for entry in list_folder(here):
            if entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, f"{prefix}{entry.name}/"))
            else:
                yield _found(entry, prefix + entry.name)


def _found(entry: os.DirEntry[str], path: str) -> FoundFile:
    status = entry.stat(follow_symlinks=False)
    return FoundFile(path, status.st_size, status.st_mtime_ns)
