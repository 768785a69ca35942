"""The error for a disk that is full, or has no inodes left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardprep.formats.errors import NoSpace


def no_space(path: str | os.PathLike[str]) -> NoSpace:
    """Return the error for a file on a full disk. Call it before anything is removed."""
    return NoSpace(advice(path), path=path)


def as_no_space(error: BaseException | None, path: Path) -> NoSpace | None:
    """Return NoSpace for an error of a full disk, None for any other; without a file, it names ``path``."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return None
    return no_space(error.filename or path)


def advice(path: str | os.PathLike[str] | None) -> str:
    """Return what is used up on the disk of that file, and what to do."""
    if path is not None and _has_no_inodes(Path(os.fsdecode(path))):
        return (
            "the disk has room but no inodes: it holds as many files as it can; remove some, and run the same "
            "command again"
        )
    return "the disk is full; make room and run the same command again"


def _has_no_inodes(path: Path) -> bool:
    place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    try:
        disk = os.statvfs(place)
    except OSError:
        return False
    return disk.f_files > 0 and disk.f_favail == 0 and disk.f_bavail > 0  # without a fixed number, both are 0
