"""The status of files below a folder that are named in any order."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.sources.listing.tree_files import refuse_links
from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.no_follow import open_folder, open_folder_below
from shardprep.formats.system.owned import Owned

_MISSING = (FileNotFoundError, NotADirectoryError)


class FileStatus(Owned, AbstractContextManager["FileStatus"]):
    """The status of the files below ``root``; the folder of the last file stays open.

    Without ``follow_symlinks``, a link in the path of a file below the root is SourceDamaged.
    """

    def __init__(self, root: Path, *, follow_symlinks: bool) -> None:
        self._root = root
        self._follow = follow_symlinks
        self._place: str | None = None
        self._folder = Descriptor(-1)

    def __exit__(self, *_: object) -> None:
        self._folder.close()

    def of(self, place: str) -> os.stat_result | None:
        """Return a file's status, None if it is missing. Raises SourceDamaged if it is no file, OSError."""
        try:
            status = self._status(place)
        except _MISSING:
            if not self._follow:
                refuse_links(self._root, self._root / place)
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # no file has such a name
                return None
            if not self._follow:
                refuse_links(self._root, self._root / place)
            raise OSError(error.errno, error.strerror, str(self._root / place)) from error
        if stat.S_ISLNK(status.st_mode):
            refuse_links(self._root, self._root / place)
        if not stat.S_ISREG(status.st_mode):
            raise SourceDamaged("is not a file", path=self._root / place)
        return status

    def _status(self, place: str) -> os.stat_result:
        if self._follow:
            return (self._root / place).stat()
        folder, _, name = place.rpartition("/")
        if folder != self._place:
            self._open(folder)
        return os.stat(name, dir_fd=self._folder.fileno(), follow_symlinks=False)

    def _open(self, place: str) -> None:
        self._folder.close()
        self._place = None
        root = open_folder(self._root)
        try:
            opened = open_folder_below(root, os.fsencode(place)) if place else os.dup(root)
        finally:
            os.close(root)
        self._folder = Descriptor(opened)
        self._place = place


def place_below(path: str, roots: Sequence[Path]) -> str:
    """Return the path of a file below the root, in its shortest form. Raises ValueError.

    ``roots`` are the names of the root in which an absolute path may begin.
    """
    if path.startswith("/"):
        root = next((root for root in roots if Path(path).is_relative_to(root)), None)
        if root is None:
            raise ValueError(f"{path[:200]!r} does not lie below {roots[0]}; give another --root")
        path = str(Path(path).relative_to(root))
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path[:200]!r} may lead out of the folder; write it without ..")
    place = "/".join(parts)
    if not place or "\0" in place:
        raise ValueError("names no file")
    if len(place.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"has a path of more than {MAX_KEY_BYTES} bytes")
    return place
