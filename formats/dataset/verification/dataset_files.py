"""Where a verification finds the files of a dataset."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.dataset.manifest import Manifest, read_manifest

from .report import Finding, unfinished, unlisted

UNFINISHED = "is of a prep join that is not finished; the same command goes on, another one removes it"
MISSING = "is missing"


def wrong_size(entry: FileEntry, size: int) -> str:
    """Say that a file does not have its size; empty if it has."""
    return f"has {size} bytes, not {entry.size}" if size != entry.size else ""


class DatasetFiles:
    """The files of a dataset in ``folder``, on this machine. Picklable."""

    url: str | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._absolute = folder.absolute()  # another process has another current folder

    def manifest(self) -> Manifest:
        """Read the manifest. Raises ManifestDamaged, UnknownVersion, OSError."""
        return read_manifest(self.folder)

    def look(self, entries: Sequence[FileEntry], level: str) -> None:
        """Prepare :meth:`issue` for all of these files."""

    def issue(self, entry: FileEntry) -> str:
        """Say what is wrong with a file that is not read, by its kind and size; empty if nothing.

        Raises OSError.
        """
        try:
            status = (self.folder / entry.name).lstat()
        except FileNotFoundError:
            return MISSING
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        return wrong_size(entry, status.st_size)

    def at_hand(self, entry: FileEntry) -> AbstractContextManager[Path]:
        """Return a context of the path of a file, which stays there within it; it is no link."""
        return nullcontext(self._absolute / entry.name)

    def others(self, manifest: Manifest) -> Iterator[tuple[Finding, bool]]:
        """Yield the files that the manifest does not list, and whether they do harm. Raises OSError."""
        yield from ((finding, True) for finding in unlisted(self.folder, manifest))
        for path in unfinished(self.folder, manifest):
            yield Finding(path.name, UNFINISHED), False
