"""The running of checks: in threads and processes of this machine, or on an executor."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Self, TypeVar

from shardprep.formats.errors import ManifestDamaged, UnknownVersion
from shardprep.formats.images.decode import crashes_decoder
from shardprep.formats.runtime.executors import (
    other_machine,
    refuse_other_versions,
)
from shardprep.formats.runtime.files import OPEN_FLAGS, Identity
from shardprep.formats.runtime.workers import ChildDied, WorkerPool
from shardprep.formats.shards.in_place import ARCHIVE_NAME
from shardprep.formats.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.verification.checks import FileCheck
from shardprep.formats.verification.report import CheckResult, Finding

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
        archive_bytes: int | None = None
        with suppress(OSError):
            if manifest.archive and not manifest.archive.issue(path):
                archive_bytes = manifest.archive.size
        return cls(path, manifest.root, _versions(decode=decode), decode, archive_bytes)

    def called(self, name: str, call: Callable[[], T]) -> T:
        """Make a call that reads the file ``name``.

        Raises OtherMachine, before that, unless this machine sees the same dataset and file, and has the same
        versions. Raises what the call raises.
        """
        refuse_other_versions(self.versions, _versions(decode=self.decode), "verification")
        if issue := self._issue(name):
            raise other_machine(
                f"does not see the dataset ({issue}); mount it there at the same path",
                self.path,
            )
        return call()

    def _issue(self, name: str) -> str:
        """Say what this machine does not see; empty if it sees all that a check of the file reads."""
        try:
            root, sizes = _known(self.path, Identity.of(_status(self.path / MANIFEST_NAME)))
            if root != self.root:
                return "its root differs"
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


def _status(path: Path, flags: int = 0) -> os.stat_result:
    """Return the status of a file, which is opened so that NFS asks the server for it."""
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


def checked(check: FileCheck, timeout_s: float, children: WorkerPool) -> CheckResult:
    """Return the findings of a check in one of the ``children``, with the images that crash the decoder.

    A process is used again only if it found nothing: a damaged file may leave a library in disorder. Raises
    ChildDied if reading the records crashes, ChildLost if a process is killed or takes longer, and
    OperationError if the system allows no further process.
    """

    def result(call: Callable[..., CheckResult], *given: range) -> CheckResult:
        return children.call_within(timeout_s, lambda found: found.is_empty, call, *given)

    def decoded(ordinals: range) -> CheckResult:
        """Decode these images in one process; if it crashes, each half of them in another one."""
        try:
            return result(check.decoded, ordinals)
        except ChildDied as error:
            if len(ordinals) == 1:
                key = children.call_within(timeout_s, lambda key: False, check.key_of, ordinals[0])
                return CheckResult([Finding(check.entry.name, crashes_decoder(error.signal), key)])
        half = len(ordinals) // 2
        return merged(decoded(ordinals[:half]), decoded(ordinals[half:]))

    try:
        return result(check.found)
    except ChildDied:
        if not check.decode:
            raise
    found = result(replace(check, decode=False).found)
    crashed = decoded(range(check.entry.records))
    if not crashed.findings:
        problem = "the decoder crashed on its images together, but on none of them alone"
        crashed.notes.append(Finding(check.entry.name, problem))
    return merged(found, crashed)


def merged(first: CheckResult, second: CheckResult) -> CheckResult:
    """Return the findings of both, with the digests of the first."""
    return CheckResult(
        first.findings + second.findings,
        first.unchecked + second.unchecked,
        first.notes + second.notes,
        first.digests,
    )
