"""Opening files below a folder through descriptors, so that no link is followed, even a new one."""

from __future__ import annotations

import os

from .regular_file import OPEN_FLAGS

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ON_THE_WAY = _FOLDER | getattr(os, "O_PATH", 0)  # O_PATH is faster, and needs no read permission
_FILE = OPEN_FLAGS | os.O_NOFOLLOW


def open_folder(path: str | os.PathLike[str]) -> int:
    """Open a folder. Raises OSError (ENOTDIR, ELOOP) if the last part of the path is a link."""
    return os.open(path, _FOLDER)


def open_folder_below(folder: int, place: bytes) -> int:
    """Open a folder by its path below another one; none of its parts may be a link."""
    return _opened(folder, place, _FOLDER)


def open_below(folder: int, place: bytes) -> int:
    """Open a file for reading in the same way."""
    return _opened(folder, place, _FILE)


def _opened(folder: int, place: bytes, flags: int) -> int:
    *on_the_way, name = place.split(b"/")
    here = folder
    try:
        for part in on_the_way:
            inner = os.open(part, _ON_THE_WAY, dir_fd=here)
            if here != folder:
                os.close(here)
            here = inner
        return os.open(name, flags, dir_fd=here)
    finally:
        if here != folder:
            os.close(here)
