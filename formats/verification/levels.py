"""Verification of a dataset in a folder, at one of four levels: it reports every finding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardprep.formats.errors import DataError, DatasetNotFound, ManifestDamaged, OperationError, UsageError
from shardprep.formats.records.record import content_root
from shardprep.formats.runtime.files import hash_descriptor, user_path
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.shards.container import advice_for, place_of
from shardprep.formats.shards.files import FileEntry, Rows
from shardprep.formats.shards.in_place import ARCHIVE_NAME, changed_in, hash_region
from shardprep.formats.shards.manifest import MANIFEST_NAME, QUARANTINE_NAME, Manifest
from shardprep.formats.shards.tables import (
    BOXES_NAME,
    INDEX_NAME,
    checked_boxes,
    checked_column,
    checked_index,
)
from shardprep.formats.verification.checks import (
    NO_MEMORY,
    Check,
    CheckResult,
    check_quarantine,
    false_claims,
)
from shardprep.formats.verification.report import Finding, Report
from shardprep.formats.verification.running import (
    CheckRunner,
    DatasetFiles,
    IsolatedChecks,
    SeenDataset,
    isolated_check,
    record_checks,
    regions_of,
)

LEVELS = ("quick", "full", "records", "decode")

# A library can loop without end over a damaged tree; a slow disk must not be taken for that.
SHARD_TIMEOUT_S = 600.0
SLOWEST_BYTES_PER_SECOND = 1e6

T = TypeVar("T")


def verify_folder(
    dataset: str | os.PathLike[str],
    *,
    level: str = "full",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check the dataset in a folder, as :func:`shardprep.formats.verify` does.

    Raises UnknownVersion, UsageError, OSError if the manifest cannot be read, and OperationError if the
    system allows no further thread; with an ``executor`` ExecutorFailed and OtherMachine.
    """
    check_level(level)
    path = user_path(dataset)
    if not path.exists():
        raise DatasetNotFound.at(path)
    if not path.is_dir():
        raise UsageError("is not a dataset folder", path=path)
    return verify_files(DatasetFiles(path), level, workers, executor, progress)


def check_level(level: str) -> None:
    """Raise UsageError for a level that there is not."""
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")


def verify_files(
    files: DatasetFiles,
    level: str,
    workers: int | None,
    executor: Executor | None,
    progress: Progress | None,
) -> Report:
    """Check the dataset of these files, as :func:`verify` does."""
    report = Report(files.folder, level, url=files.url)
    try:
        report.manifest = files.manifest()
    except ManifestDamaged as error:
        report.findings.append(Finding(MANIFEST_NAME, error.message))
        return report
    report.dataset = files.folder
    _Verification(report, report.manifest, files, workers, executor, shown(progress)).run()
    return report


class _Verification:
    """One run over one dataset with an intact manifest."""

    def __init__(
        self,
        report: Report,
        manifest: Manifest,
        files: DatasetFiles,
        workers: int | None,
        executor: Executor | None,
        progress: Progress,
    ) -> None:
        self.files = files
        self.report = report
        self.manifest = manifest
        self.checks = IsolatedChecks()
        decode, path = report.level == "decode", report.dataset
        there = None if executor is None else (executor, SeenDataset.here(path, manifest, decode=decode))
        self.runner = CheckRunner(there, workers, progress, self.checks.end)
        self.columns = manifest.columns.entries if manifest.columns else ()

    def run(self) -> None:
        if self.manifest.table(INDEX_NAME) is None:
            self._found(MANIFEST_NAME, f"does not list {INDEX_NAME}, which every dataset needs")
        self.files.look(self.manifest.files, self.report.level)
        sound = [entry for entry in self.manifest.files if self._is_sound(entry)]
        is_there = self._is_archive_sound()
        with self._reading("."):
            for finding, is_harm in self.files.others(self.manifest):
                (self.report.findings if is_harm else self.report.notes).append(finding)
        if self.report.level == "quick":
            return
        index, tables = self._read_tables({entry.name for entry in sound})
        if self.report.level == "full":
            self._hash(sound)
            self._hash_regions(self.manifest.shards if is_there else ())
            return
        checks = record_checks(self.report, self.manifest, index, tables)
        if not is_there:
            for shard in self.manifest.shards:
                del checks[shard.name]
        self._hash([entry for entry in sound if entry.name not in checks])
        self._check_promises(index, {entry.name for entry in sound})
        self._check_records([entry for entry in sound if entry.name in checks], checks)

    def _is_archive_sound(self) -> bool:
        """Whether the archive that the images are in, if they are in one, is there and has its size."""
        archive, issue = self.manifest.archive, "could not be checked"
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
        issue: str | None = None
        with self._reading(entry.name):
            issue = self.files.issue(entry)
        if issue:
            self._found(entry.name, issue)
        return issue == ""

    def _found(self, name: str, problem: str, key: str | None = None) -> None:
        self.report.findings.append(Finding(name, problem, key))

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

    def _read_tables(self, sound: set[str]) -> tuple[Rows | None, dict[str, Rows | None]]:
        """Check the tables named in ``sound``; return the index, and those of columns, that are intact."""
        index: Rows | None = None
        tables: dict[str, Rows | None] = {}
        columns = {column.table.name: column for column in self.columns}
        wanted = sound & {INDEX_NAME, BOXES_NAME, *columns}
        for entry in (file for file in self.manifest.files if file.name in wanted):
            with self._reading(entry.name), self.files.at_hand(entry):
                if entry.name == INDEX_NAME:
                    index = checked_index(self.files.folder, self.manifest)
                elif entry.name == BOXES_NAME:
                    checked_boxes(self.files.folder, self.manifest)
                else:
                    tables[entry.name] = checked_column(self.files.folder, self.manifest, columns[entry.name])
        return index, tables

    def _check_promises(self, index: Rows | None, sound: set[str]) -> None:
        if index is not None:
            for problem in false_claims(self.manifest, index):
                self._found(MANIFEST_NAME, problem)
        listed = self.manifest.table(QUARANTINE_NAME)
        if listed is None or QUARANTINE_NAME in sound:
            with self._reading(QUARANTINE_NAME), self.files.at_hand(listed) if listed else nullcontext():
                check_quarantine(self.files.folder, self.manifest)

    def _hash(self, entries: list[FileEntry]) -> None:
        """Hash the files that were not hashed when they were read."""
        read = {INDEX_NAME, BOXES_NAME} | {c.table.name for c in self.columns if not c.field.is_fixed}
        unread = [entry for entry in entries if entry.name not in read]
        calls = [partial(_hash_of, self.files, entry) for entry in unread]
        for entry, digest in self._results("hash", unread, calls):
            if digest != entry.sha256:
                self._found(entry.name, "its SHA-256 differs from the manifest")

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
        """Yield the results of the calls, in order; an unreadable file is reported, the others are read."""
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
        calls = [partial(_checked, make, self.files, checks[file.name], file) for file in sized]
        with self.checks:
            for entry, found in self._results(self.report.level, sized, calls):
                digests[entry.name] = found.digests
                if found.changed:
                    self._found(ARCHIVE_NAME, found.changed)
                for key, problem in found.problems:
                    self._found(entry.name, problem, key)
                self.report.notes += [Finding(entry.name, note, key) for key, note in found.notes]
                self.report.unchecked += [Finding(entry.name, reason) for reason in found.unread]
        if self.report.exit_code == 0:
            self._check_content_roots(digests)

    def _check_content_roots(self, digests: Mapping[str, bytes]) -> None:
        if content_root(digests[s.name] for s in self.manifest.shards) != self.manifest.records_root:
            self._found(MANIFEST_NAME, "its content_root differs from that of the records")
        for column in self.columns:
            files = column.shards or (column.table,)
            if content_root(digests[file.name] for file in files) != column.content_root:
                self._found(
                    MANIFEST_NAME,
                    f"its content_root of the column {column.field.name} differs from that of the values",
                )


def _hash_of(files: DatasetFiles, entry: FileEntry) -> str:
    """Return the hash of a file, through one descriptor, so that its name may change."""
    with files.at_hand(entry) as path:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return hash_descriptor(descriptor)
        finally:
            os.close(descriptor)


def _checked(
    make: Callable[[Check, float], CheckResult], files: DatasetFiles, check: Check, entry: FileEntry
) -> CheckResult:
    with files.at_hand(entry) as path:
        return make(replace(check, path=path), SHARD_TIMEOUT_S + entry.size / SLOWEST_BYTES_PER_SECOND)
