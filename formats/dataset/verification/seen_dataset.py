"""A dataset as one machine sees it, and another must see it to check its files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Self, TypeVar

from shardprep.formats.containers.archive import ARCHIVE_NAME
from shardprep.formats.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.errors import ManifestDamaged, UnknownVersion
from shardprep.formats.processes.executors.other_machine import other_machine, refuse_other_versions
from shardprep.formats.system.regular_file import OPEN_FLAGS, Identity

UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO)

T = TypeVar("T")


@dataclass(frozen=True)
class SeenDataset:
    """The dataset of that ``root`` at ``path``, seen by a machine with these ``versions``. Picklable.

    ``decode`` is whether values are decoded, and ``archive_bytes`` the size of the archive that the images
    are in, None if they are in none or this machine does not see it as it was.
    """

    path: Path
    root: str
    versions: Mapping[str, str]
    decode: bool
    archive_bytes: int | None

    @classmethod
    def here(cls, path: Path, manifest: Manifest, *, decode: bool) -> Self:
        """Return the dataset as this machine sees it."""
        path = path.absolute()
        return cls(path, manifest.root, _versions(decode=decode), decode, _archive_bytes(path, manifest))

    def called(self, name: str, call: Callable[[], T]) -> T:
        """Make a call that reads the file ``name``.

        Raises OtherMachine, before that, unless this machine sees the same dataset and file, and has the same
        versions. Raises what the call raises.
        """
        refuse_other_versions(self.versions, _versions(decode=self.decode), "verification")
        if issue := self._issue(name):
            raise other_machine(
                f"does not see the dataset that is verified ({issue}); mount it there at the same path",
                self.path,
            )
        return call()

    def _issue(self, name: str) -> str:
        """Say what this machine does not see; empty if it sees all that a check of the file reads."""
        try:
            root, sizes = _known(self.path, Identity.of(_status(self.path / MANIFEST_NAME)))
            if root != self.root:
                return "its root is another"
            try:
                file = _status(self.path / name, os.O_NOFOLLOW)
            except OSError as error:
                return "" if error.errno in UNREADABLE else str(error)  # the call reports what is unreadable
            if not stat.S_ISREG(file.st_mode) or file.st_size != sizes[name]:
                return f"{name} has another size"
            if self.archive_bytes is None:
                return ""
            if _status(self.path / ARCHIVE_NAME).st_size != self.archive_bytes:
                return f"{ARCHIVE_NAME} has another size"
        except (OSError, ManifestDamaged, UnknownVersion) as error:
            return str(error)
        return ""


def _versions(*, decode: bool) -> dict[str, str]:
    """Return the versions of this machine that decide the findings."""
    found = {"shardprep": version("shardprep")}
    if decode:
        from shardprep.formats.images.opencv import cv2  # start-up time: OpenCV

        found["OpenCV"] = cv2.__version__
    return found


def _archive_bytes(path: Path, manifest: Manifest) -> int | None:
    with suppress(OSError):
        return manifest.archive.size if manifest.archive and not manifest.archive.issue(path) else None
    return None


def _status(path: Path, flags: int = 0) -> os.stat_result:
    """Return the status of a file that is opened: NFS then asks the server, and shows what is new."""
    descriptor = os.open(path, OPEN_FLAGS | flags)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4)
def _known(path: Path, manifest: Identity) -> tuple[str, dict[str, int]]:
    """Return the root, and the size of each file, of the dataset there; a worker checks many files of it."""
    found = read_manifest(path)
    return found.root, {file.name: file.size for file in found.files}
