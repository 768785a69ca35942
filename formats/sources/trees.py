"""Folders of images: walking through them, and reading their files."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.images.header import begins_as_image
from shardprep.formats.runtime.files import CHANGED, OPEN_FLAGS, name_in_os_errors, read_at
from shardprep.formats.runtime.json_record import is_text
from shardprep.formats.runtime.owners import Descriptor
from shardprep.formats.sources.source import IMAGE_SUFFIXES, Problems, ResourceReader

IGNORED_NAMES = (
    *("Thumbs.db", "desktop.ini", "System Volume Information", "$RECYCLE.BIN", ".DS_Store", "__MACOSX"),
    *("lost+found", "@eaDir", "#recycle", "@Recycle"),
)
OTHER_HIDDEN = "other hidden"
NON_IMAGES = "non-image files"
NOT_UTF8 = "has a name that is not UTF-8; rename it"
_HEAD_BYTES = 12
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_IS_LINK = (
    "is a symbolic link, but only SOURCE itself may be one; replace it with its target, or convert with "
    "--follow-symlinks"
)


class FoundFile(NamedTuple):
    """A regular file: its path below the start of the walk (with ``/``), size, and wrapped mtime."""

    path: str
    size: int
    mtime_ns: int


def is_image(file: FoundFile) -> bool:
    """Whether the file has an image suffix."""
    return file.path.lower().endswith(IMAGE_SUFFIXES)


def holds_images(folder: Path, depth: int = 2) -> bool:
    """Whether a file in a folder, or in a folder in it, has an image suffix."""
    with suppress(OSError), os.scandir(folder) as entries:
        return any(
            entry.name.lower().endswith(IMAGE_SUFFIXES)
            or (depth > 1 and entry.is_dir() and holds_images(folder / entry.name, depth - 1))
            for entry in entries
        )
    return False


def find_unused_folders(root: Path, used: Iterable[Path]) -> list[str]:
    """Return the names of the image folders in ``root``, except those that are or contain ``used`` ones."""
    resolved = [folder.resolve() for folder in used]
    if root.resolve() in resolved:
        return []
    others = (each for each in root.iterdir() if each.name[0] != "." and each.is_dir())
    others = (each for each in others if not any(one.is_relative_to(each.resolve()) for one in resolved))
    return sorted(each.name for each in others if holds_images(each))


def other_folders_note(root: Path, used: Sequence[Path]) -> tuple[str, ...]:
    """Return notes for a listing about image folders in ``root`` that are not ``used``, and images there."""
    names = find_unused_folders(root, used)
    others = (f"folders with images that are left out: {', '.join(names)}",) if names else ()
    is_beside = holds_images(root, 1) and root.resolve() not in [folder.resolve() for folder in used]
    return (*others, f"images directly in {root} are left out") if is_beside else others


def wrap_mtime(mtime_ns: int) -> int:
    """Wrap an mtime modulo 2**64 to an int64, to compare: times after 2262 are beyond it."""
    return (mtime_ns + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True)
class FolderWalk:
    """A walk through the folders below ``top``, in the order of names.

    Hidden names and IGNORED_NAMES are skipped and counted in ``ignored``. Fifos, sockets, devices, links, and
    names that are not UTF-8 are skipped and added to ``problems``, which the caller raises. With
    ``follow_symlinks``, links are followed inside and outside ``top``; only broken and cyclic ones are
    problems.

    All methods raise OSError, and without ``follow_symlinks`` SourceDamaged if ``top`` or a folder on the way
    is a link.
    """

    top: Path
    follow_symlinks: bool = False
    problems: Problems = field(default_factory=Problems)
    ignored: Counter[str] = field(default_factory=Counter)
    _link_free: set[str] = field(default_factory=set, init=False, repr=False)  # folders without links above

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in ``folder``, without reporting problems of files."""
        return [name for name in self._scan(folder, files=False) if isinstance(name, str)]

    def files(self, folder: str = "") -> list[FoundFile]:
        """Return the files in ``folder``, without reporting problems of folders."""
        return [file for file in self._scan(folder, folders=False) if isinstance(file, FoundFile)]

    def files_below(self, folder: str = "") -> Iterator[FoundFile]:
        """Yield the files in ``folder`` and all folders below it."""
        waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
        while waiting:
            prefix, above = waiting.pop()
            here = f"{folder}/{prefix}".strip("/")
            if self.follow_symlinks:
                status = (self.top / here).stat()
                above = (*above, (status.st_dev, status.st_ino))
                if above[-1] in above[:-1]:
                    cycle = "is a link to a folder that contains it; remove it"
                    self.problems.add(SourceDamaged(cycle, path=self.top / here))
                    continue
            for entry in self._scan(here):
                if isinstance(entry, FoundFile):
                    yield entry._replace(path=prefix + entry.path)
                else:
                    waiting.append((f"{prefix}{entry}/", above))

    def find(self, path: str) -> FoundFile | None:
        """Return the file at a path, None if it is missing. Raises SourceDamaged for anything else there.

        Its name may have its accents as separate characters, as macOS writes them, or not.
        """
        forms = () if path.isascii() else (normalize("NFC", path), normalize("NFD", path))
        return next(filter(None, map(self._find_exact, (path, *forms))), None)

    def _find_exact(self, path: str) -> FoundFile | None:
        folder, location = path.rpartition("/")[0], f"{self.top}/{path}"
        try:
            if not self.follow_symlinks and folder not in self._link_free:
                refuse_links(self.top, self.top / folder)
                self._link_free.add(folder)
            status = os.stat(location, follow_symlinks=self.follow_symlinks)  # noqa: PTH116 - a Path takes longer
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):  # no file has such a name
                return None
            raise
        if stat.S_ISLNK(status.st_mode):
            refuse_links(self.top, self.top / path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceDamaged("is not a file", path=location)
        return FoundFile(path, status.st_size, wrap_mtime(status.st_mtime_ns))

    def skip_non_image(self, file: FoundFile, folder: str = "") -> bool:
        """Whether a file below ``folder`` is not an image by its name and first bytes; if so, count it."""
        if is_image(file):
            return False
        path = self.top / folder / file.path
        with name_in_os_errors(path), path.open("rb") as opened:
            is_other = not begins_as_image(opened.read(_HEAD_BYTES))
        if is_other:
            self.ignored[NON_IMAGES] += 1
        return is_other

    def _scan(self, folder: str, *, folders: bool = True, files: bool = True) -> list[FoundFile | str]:
        """Return the files, and the names of the folders, by name; count ignored ones and add problems."""
        here = self.top / folder
        if not self.follow_symlinks:
            refuse_links(self.top.parent, here)
        found: list[FoundFile | str] = []
        with name_in_os_errors(here), os.scandir(here) as scan:
            for entry in sorted(scan, key=lambda entry: entry.name):
                if entry.name in IGNORED_NAMES or entry.name.startswith("."):
                    self.ignored[entry.name if entry.name in IGNORED_NAMES else OTHER_HIDDEN] += 1
                    continue
                is_folder = is_file = False
                with suppress(OSError):  # such as a loop of links
                    is_folder = entry.is_dir()
                    is_file = entry.is_file()
                if not (folders if is_folder else files):
                    continue
                wrong = ""
                if not is_text(entry.name):
                    wrong = NOT_UTF8
                elif entry.is_symlink() and not self.follow_symlinks:
                    wrong = _IS_LINK
                elif not is_folder and not is_file:
                    wrong = "is neither a file nor a folder, nor a link to one that can be reached; remove or repair it"
                if wrong:
                    self.problems.add(SourceDamaged(wrong, path=here / entry.name))
                elif is_folder:
                    found.append(entry.name)
                else:
                    status = entry.stat(follow_symlinks=self.follow_symlinks)
                    found.append(FoundFile(entry.name, status.st_size, wrap_mtime(status.st_mtime_ns)))
        return found


def files_below(top: Path) -> Iterator[FoundFile]:
    """Yield the files below a folder. Raises OSError, and SourceDamaged for all problems at the end."""
    walk = FolderWalk(top)
    yield from walk.files_below()
    walk.problems.raise_all()


def refuse_links(top: Path, path: Path) -> None:
    """Raise SourceDamaged if ``path``, or a folder between ``top`` and it, is a link."""
    while path != top:
        if path.is_symlink():
            raise SourceDamaged(_IS_LINK, path=path)
        path = path.parent


# of a file that is gone, behind a link, a folder or a fifo
_CHANGED_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESPIPE)
IMAGE_COLUMNS = ("path", "image_length", "mtime_ns")
"""The columns of a TreeReader where an entry's length includes the bytes of its values."""


@dataclass
class TreeReader(ResourceReader[Descriptor]):
    """Reader of files below ``root``, which must be unchanged since they were listed.

    With ``follow_symlinks`` links are followed; without it, a file that is now a link counts as changed.
    ``columns`` are the entries' columns with a file's path below ``root``, its size and its mtime.
    """

    root: Path
    follow_symlinks: bool = False
    columns: tuple[str, str, str] = ("path", "length", "mtime_ns")

    def open_resource(self) -> AbstractContextManager[Descriptor]:
        return closing(Descriptor(os.open(self.root, _FOLDER)))

    def read(self, entry: np.void) -> bytes:
        folder, path = self.resource.fileno(), entry[self.columns[0]].item()
        flags = OPEN_FLAGS if self.follow_symlinks else OPEN_FLAGS | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, dir_fd=folder)
            try:
                size, mtime_ns = (int(entry[name]) for name in self.columns[1:])
                data = read_at(fd, size, 0) if size else b""
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _CHANGED_ERRNOS:
                raise SourceDamaged(CHANGED, path=self.location_of(entry)) from error
            raise OSError(error.errno, error.strerror, self.location_of(entry)) from error
        if (len(data), status.st_size, wrap_mtime(status.st_mtime_ns)) != (size, size, mtime_ns):
            raise SourceDamaged(CHANGED, path=self.location_of(entry))
        return data

    def location_of(self, entry: np.void) -> str:
        return str(self.root / os.fsdecode(entry[self.columns[0]].item()))
