"""Verification: checks that a dataset is complete and intact, and reports every finding."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardprep.formats.containers.archive import (
    ARCHIVE_NAME,
    advice_for,
    changed_in,
    hash_region,
    place_of,
)
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import Rows
from shardprep.formats.dataset.index import BOXES_NAME, INDEX_NAME
from shardprep.formats.dataset.manifest import (
    MANIFEST_NAME,
    QUARANTINE_NAME,
    Manifest,
    read_manifest,
)
from shardprep.formats.dataset.table_checks import checked_boxes, checked_column, checked_index
from shardprep.formats.errors import DataError, ManifestDamaged, OperationError, UsageError
from shardprep.formats.progress import Progress, shown
from shardprep.formats.records.record import content_root
from shardprep.formats.system.atomic_write import hash_descriptor
from shardprep.formats.system.user_path import user_path

from .check import NO_MEMORY, Check, Checked
from .check_runner import CheckRunner
from .isolated_check import IsolatedChecks, isolated_check
from .manifest_claims import check_quarantine, false_claims
from .record_checks import KnownTables, record_checks, regions_of
from .report import Finding, Report, unfinished, unlisted
from .seen_dataset import SeenDataset

UNFINISHED = "is of a prep join that is not finished; the same command goes on, another one removes it"
LEVELS = ("quick", "full", "records", "decode")

# A library can loop without end over a damaged tree; a slow disk must not be taken for that.
SHARD_TIMEOUT_S = 600.0
SLOWEST_BYTES_PER_SECOND = 1e6

T = TypeVar("T")


def verify(
    dataset: str | os.PathLike[str],
    *,
    level: str = "full",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a dataset, and return every finding. Never changes the dataset, and does not crash on damage.

    ``dataset`` is its folder. ``workers`` is the number of parallel reads; None or 0 is one per usable CPU.
    An ``executor`` of :mod:`concurrent.futures`, of this machine or of many, reads the shards instead, and is
    left open: at most ``workers`` at a time, None or 0 is 256. The report is that of this machine alone.
    ``progress`` receives the progress; None shows a bar in a notebook. Each ``level`` includes the one
    before:

    ``quick``: the manifest matches its ``root``; its files exist with their sizes, and there are no others.

    ``full``: every SHA-256 matches. The index and the table of boxes fit the manifest: rows, shards, lengths
    (``image_bytes``), labels, boxes' records. So do the columns' tables. So the dataset can be opened.

    ``records``: every record matches its checksum and its row of the index, every value of a column its
    checksum, its record's key and its row of the table, and all match ``content_root``.
    Keys are unique; the order is the plan's; ``skipped`` and ``class_sorted`` are true, and so is ``partial``
    for the official classes (for others it depends on the source). If images were skipped, the plan's order
    and ``class_sorted`` cannot be checked. Each shard is read in a separate process.

    ``decode``: every image decodes, and every value of a column is one of its kind.

    No level compares with the source: ``source``, ``writer``, the classes' words and the boxes' coordinates
    are only protected by a pinned ``root``. Raises UnknownVersion, UsageError, OSError if the manifest cannot
    be read, and OperationError if the system allows no further thread; with an ``executor`` ExecutorFailed,
    and OtherMachine, which names a machine that sees another dataset, or none.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")
    path = user_path(dataset)
    if not path.is_dir():
        raise UsageError("is not a dataset folder", path=path)
    report = Report(path, level)
    try:
        report.manifest = read_manifest(path)
    except ManifestDamaged as error:
        report.findings.append(Finding(MANIFEST_NAME, error.message))
        return report
    _Verification(report, report.manifest, workers, executor, shown(progress)).run()
    return report


class _Verification:
    """One run over one dataset with an intact manifest."""

    def __init__(
        self,
        report: Report,
        manifest: Manifest,
        workers: int | None,
        executor: Executor | None,
        progress: Progress,
    ) -> None:
        self.report = report
        self.manifest = manifest
        self.checks = IsolatedChecks()
        decode, path = report.level == "decode", report.dataset
        there = None if executor is None else (executor, SeenDataset.here(path, manifest, decode=decode))
        self.runner = CheckRunner(there, workers, progress, self.checks.end)
        self.columns = manifest.columns.entries if manifest.columns else ()

    def run(self) -> None:
        if self.manifest.table(INDEX_NAME) is None:
            self._found(MANIFEST_NAME, f"lists no {INDEX_NAME}, without which no dataset can be opened")
        sound = [entry for entry in self.manifest.files if self._is_sound(entry)]
        is_there = self._is_archive_sound()
        with self._reading("."):
            self.report.findings += unlisted(self.report.dataset, self.manifest)
            self.report.notes += [
                Finding(path.name, UNFINISHED) for path in unfinished(self.report.dataset, self.manifest)
            ]
        if self.report.level == "quick":
            return
        tables = self._read_tables({entry.name for entry in sound})
        if self.report.level == "full":
            self._hash(sound)
            self._hash_regions(self.manifest.shards if is_there else ())
            return
        checks = record_checks(self.report, self.manifest, tables)
        if not is_there:
            for shard in self.manifest.shards:
                del checks[shard.name]
        self._hash([entry for entry in sound if entry.name not in checks])
        self._check_promises(tables.index, {entry.name for entry in sound})
        self._check_records([entry for entry in sound if entry.name in checks], checks)

    def _is_archive_sound(self) -> bool:
        """Whether the archive that the images are in, if they are in one, is there and has its size."""
        archive, issue = self.manifest.archive, "could not be examined"
        if archive is None:
            return True
        with self._reading(ARCHIVE_NAME):
            issue = archive.issue(self.report.dataset)
            if issue:
                link = self.report.dataset / ARCHIVE_NAME
                self._found(ARCHIVE_NAME, f"{place_of(link)} {issue}; {advice_for(link)}")
        return not issue

    def _is_sound(self, entry: FileEntry) -> bool:
        """Whether a file is there, regular, and of its size."""
        status = None
        with self._reading(entry.name):
            try:
                status = (self.report.dataset / entry.name).lstat()
            except FileNotFoundError:
                return self._found(entry.name, "is missing")
        if status is None:
            return False
        if not stat.S_ISREG(status.st_mode):
            return self._found(entry.name, "is not a regular file")
        if status.st_size != entry.size:
            return self._found(entry.name, f"has {status.st_size} bytes, not {entry.size}")
        return True

    def _found(self, name: str, problem: str, key: str | None = None) -> bool:
        self.report.findings.append(Finding(name, problem, key))
        return False

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Report damage of a file as a finding, and an error of the system as unchecked."""
        try:
            yield
        except DataError as error:
            self._found(name, error.message)
        except OperationError as error:
            self.report.unchecked.append(Finding(name, error.message))
        except OSError as error:
            self.report.unchecked.append(Finding(name, error.strerror or str(error)))
        except MemoryError:
            self.report.unchecked.append(Finding(name, NO_MEMORY))

    def _read_tables(self, sound: set[str]) -> KnownTables:
        """Check the tables named in ``sound``; return those that are intact."""
        known = KnownTables()
        if INDEX_NAME in sound:
            with self._reading(INDEX_NAME):
                known.index = checked_index(self.report.dataset, self.manifest)
        if BOXES_NAME in sound:
            with self._reading(BOXES_NAME):
                checked_boxes(self.report.dataset, self.manifest)
        for column in self.columns:
            if column.table.name in sound:
                with self._reading(column.table.name):
                    known.columns[column.table.name] = checked_column(
                        self.report.dataset, self.manifest, column
                    )
        return known

    def _check_promises(self, index: Rows | None, sound: set[str]) -> None:
        if index is not None:
            for problem in false_claims(self.manifest, index):
                self._found(MANIFEST_NAME, problem)
        if QUARANTINE_NAME in sound or self.manifest.table(QUARANTINE_NAME) is None:
            with self._reading(QUARANTINE_NAME):
                check_quarantine(self.report.dataset, self.manifest)

    def _hash(self, entries: list[FileEntry]) -> None:
        """Hash the files that were not hashed when they were read."""
        read = {INDEX_NAME, BOXES_NAME} | {c.table.name for c in self.columns if not c.field.is_fixed}
        unread = [entry for entry in entries if entry.name not in read]
        folder = self.report.dataset.absolute()
        calls = [partial(_hash_of, folder / entry.name) for entry in unread]
        for entry, digest in self._results("hash", unread, calls):
            if digest != entry.sha256:
                self._found(entry.name, "its SHA-256 is not the manifest's")

    def _hash_regions(self, shards: Sequence[FileEntry]) -> None:
        """Hash the regions of the archive that these shards' images are in, if they are in one."""
        link, regions = self.report.dataset.absolute() / ARCHIVE_NAME, regions_of(self.manifest)
        parts = [replace(shard, size=regions[shard.name].size) for shard in shards if regions]
        calls = [partial(hash_region, link, regions[part.name]) for part in parts]
        for part, digest in self._results("hash", parts, calls):
            if digest != regions[part.name].sha256:
                self._found(ARCHIVE_NAME, changed_in(link, regions[part.name]))

    def _results(
        self, title: str, entries: Sequence[FileEntry], calls: Sequence[Callable[[], T]]
    ) -> Iterator[tuple[FileEntry, T]]:
        """Yield what the calls return, in order; an unreadable file is reported, and ends nothing."""
        for entry, outcome in self.runner.run(title, entries, calls):
            with self._reading(entry.name):
                try:
                    result = outcome()
                except DataError as error:
                    self._found(entry.name, f"its container is unreadable: {error.message}")
                else:
                    yield entry, result

    def _check_records(self, files: list[FileEntry], checks: Mapping[str, Check]) -> None:
        digests: dict[str, bytes] = {}
        room = dict(zip((s.name for s in self.manifest.shards), self.manifest.image_room, strict=True))
        sized = [replace(file, size=room.get(file.name, file.size)) for file in files]
        make = isolated_check if self.runner.elsewhere else self.checks.check
        calls = [partial(make, _absolute(checks[file.name]), _timeout_s(file)) for file in sized]
        with self.checks:
            for entry, found in self._results(self.report.level, sized, calls):
                self._note(entry, found)
                digests[entry.name] = found.digests
        if self.report.exit_code == 0:
            self._check_content_roots(digests)

    def _note(self, entry: FileEntry, found: Checked) -> None:
        if found.changed:
            self._found(ARCHIVE_NAME, found.changed)
        for key, problem in found.problems:
            self._found(entry.name, problem, key)
        self.report.notes += [Finding(entry.name, note, key) for key, note in found.notes]
        self.report.unchecked += [Finding(entry.name, reason) for reason in found.unread]

    def _check_content_roots(self, digests: Mapping[str, bytes]) -> None:
        if content_root(digests[s.name] for s in self.manifest.shards) != self.manifest.records_root:
            self._found(MANIFEST_NAME, "its content_root is not that of the records")
        for column in self.columns:
            files = column.shards or (column.table,)
            if content_root(digests[file.name] for file in files) != column.content_root:
                self._found(
                    MANIFEST_NAME, f"its content_root of the column {column.field.name} is not the values'"
                )


def _hash_of(path: Path) -> str:
    """Return the hash of a file, through one descriptor, so that its name may change."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return hash_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _absolute(check: Check) -> Check:
    """Return the check with an absolute path: another process has another current folder."""
    return replace(check, path=check.path.absolute())


def _timeout_s(file: FileEntry) -> float:
    return SHARD_TIMEOUT_S + file.size / SLOWEST_BYTES_PER_SECOND
