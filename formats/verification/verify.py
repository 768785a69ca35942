"""Verification of a dataset in a folder, or at a URL through a cache, at one of four levels.

Every finding is reported.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np

from shardprep.formats.errors import ManifestDamaged, ShardDamaged, ShardprepError, UsageError
from shardprep.formats.images.decode import cv2
from shardprep.formats.records.record import content_root
from shardprep.formats.runtime.files import hash_file, memory_file
from shardprep.formats.runtime.jobs import (
    AT_ONCE,
    ExecutorCall,
    completed_calls,
    other_machine_error,
    refuse_other_versions,
)
from shardprep.formats.runtime.loop_thread import LoopThread, run_all
from shardprep.formats.runtime.processes import WorkerPool, usable_cpus
from shardprep.formats.runtime.progress import Progress, check_int, progress_or_bar
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME
from shardprep.formats.shards.columns import unlisted_columns
from shardprep.formats.shards.manifest import (
    BOXES_NAME,
    INDEX_NAME,
    PROVENANCE_NAME,
    QUARANTINE_NAME,
    Manifest,
    check_column,
    read_box_rows,
    read_index,
    read_manifest,
)
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    MANIFEST_NAME,
    FileEntry,
    Rows,
    advice_for,
    changed_in,
    hash_region,
)
from shardprep.formats.storage.cache import AT_ONCE as DOWNLOADS_AT_ONCE, FileCache
from shardprep.formats.storage.open import cached_place
from shardprep.formats.storage.store import PATIENT, RemoteFolder
from shardprep.formats.storage.transfer import remote_dataset
from shardprep.formats.verification.checks import (
    CheckResult,
    FileCheck,
    Finding,
    Report,
    check_quarantine,
    false_claims,
    report_errors,
    run_in_child,
)

LEVELS = ("quick", "full", "records", "decode")

# A library can loop forever over a damaged tree; a slow disk must not look like that.
SHARD_TIMEOUT_S = 600.0
SLOWEST_BYTES_PER_SECOND = 1e6

MISSING = "is missing"
UNFINISHED = "belongs to an unfinished join; the same prep join continues it, another one removes it"


def verify(
    dataset: str | os.PathLike[str],
    *,
    level: str = "full",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
) -> Report:
    """Check a dataset and report every finding. Never changes the dataset, and does not crash on damage.

    Each level includes the one before:

    ``quick``: the manifest matches its ``root``; its files exist with their sizes, and there are no others.

    ``full``: every SHA-256 matches. The index, the table of boxes and the columns' tables fit the manifest:
    rows, shards, lengths (``image_bytes``), labels and the boxes' records. So the dataset can be opened.

    ``records``: every record matches its checksum and its row of the index; every column value matches its
    checksum, its record's key and its row of the table; and all match ``content_root``. Keys are unique. The
    plan's order, ``skipped`` and ``class_sorted`` are correct, and for the official classes ``partial``
    (otherwise it depends on the source). If images were skipped, the plan's order and ``class_sorted`` cannot
    be checked. Each shard is read in a separate process.

    ``decode``: every image decodes, and every column value decodes to the column's kind.

    No level compares with the source: only a pinned ``root`` protects ``source``, ``writer``, the classes'
    words and the boxes' coordinates. At a URL, extra files are not looked for.

    Args:
        dataset: Folder or URL of the dataset.
        level: "quick", "full", "records" or "decode".
        workers: Number of parallel reads; None is one per usable CPU, and 0 is one.
        executor: An executor of :mod:`concurrent.futures`, on one or many machines, that reads the shards of
            a folder instead, and is left open. At most ``workers`` jobs are submitted at a time; None or 0 is
            256. The report is the same as without it.
        progress: Receives the progress; None shows a bar in a notebook.
        cache: Folder that the files at a URL pass through; damaged copies in it are replaced. Files in it
            are read at the URL, too.
        cache_limit: Largest size of the cache, in bytes or as "200GiB"; it may be smaller than the dataset.
            None is the free space of the disk.

    Returns:
        All findings, the files that could not be checked, and notes.

    Raises:
        UnknownVersion: The format is newer than this release.
        UsageError: An argument is not valid.
        OSError: The manifest cannot be read.
        OperationError: The system allows no further process. With an ``executor`` also ExecutorFailed, and
            OtherMachine, which names a machine that sees another dataset or none.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}; choose from {', '.join(LEVELS)}")
    source = cached_place(dataset, cache, cache_limit)
    if source is not None and executor is not None:
        raise UsageError("is a URL, but an executor checks only folders; omit the executor", path=dataset)
    with nullcontext() if source is None else source.open_cache() as opened:
        files = DatasetFiles(user_path(dataset)) if opened is None else CachedFiles(opened)
        report = Report(files.folder, level, url=files.url)
        try:
            manifest = report.manifest = files.manifest()
        except ManifestDamaged as error:
            report.findings.append(Finding(MANIFEST_NAME, error.message))
            return report
        report.dataset = files.folder
        _Verification(files, report, manifest, workers, executor, progress_or_bar(progress)).run()
        return report


def wrong_size(entry: FileEntry, size: int) -> str:
    """Describe a file's wrong size; empty if it is right."""
    return f"has {size} bytes, not {entry.size}" if size != entry.size else ""


class DatasetFiles:
    """The files of a dataset in ``folder``, on this machine. Picklable."""

    url: str | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._absolute = folder.absolute()  # another process may have another working directory

    def manifest(self) -> Manifest:
        """Read the manifest. Raises ManifestDamaged, UnknownVersion, OSError."""
        return read_manifest(self.folder)

    def prepare(self, entries: Sequence[FileEntry], level: str) -> None:
        """Prepare :meth:`find_issue` for these files."""

    def find_issue(self, entry: FileEntry) -> str:
        """Describe what is wrong with a file's type or size, without reading it; empty if nothing is."""
        try:
            status = (self.folder / entry.name).lstat()
        except FileNotFoundError:
            return MISSING
        if not stat.S_ISREG(status.st_mode):
            return "is a link, or not a regular file; replace it with the file itself"
        return wrong_size(entry, status.st_size)

    def provide(self, entry: FileEntry) -> AbstractContextManager[Path]:
        """Return a context in which a file stays at its path, which is not a link."""
        return nullcontext(self._absolute / entry.name)

    def most_at_once(self, sizes: Iterable[int]) -> int:
        """Return how many files of these sizes can be at hand at once."""
        return sys.maxsize

    def stop(self) -> None:
        """End the reads of other threads, whose results are not needed."""

    def check_others(self, report: Report, manifest: Manifest) -> None:
        """Report the files that the manifest does not list. Raises OSError.

        While a join is unfinished, its work folder is expected, and its column files are only noted.
        """
        expected = {file.name for file in manifest.files}
        work_folder = self.folder / WORK_FOLDER_NAME
        if not os.path.lexists(work_folder):
            expected.add(WORK_FOLDER_NAME)  # another process may make it now
        elif not work_folder.is_symlink() and work_folder.is_dir():
            for path in unlisted_columns(self.folder, expected):
                report.notes.append(Finding(path.name, UNFINISHED))
            expected |= {WORK_FOLDER_NAME, *(note.file for note in report.notes)}
        expected |= {MANIFEST_NAME, PROVENANCE_NAME, *([ARCHIVE_NAME] if manifest.archive else [])}
        if others := {path.name for path in self.folder.iterdir()} - expected:
            others -= {file.name for file in self.manifest().files}  # a join has finished since
        for name in sorted(others):
            report.findings.append(Finding(name, "does not belong to the dataset"))


class CachedFiles(DatasetFiles):
    """The files of a dataset at a URL, cached when they are read. Not picklable."""

    def __init__(self, cache: FileCache) -> None:
        super().__init__(cache.folder.datasets)
        self.url = cache.place.url
        self._cache = cache
        self._issues: dict[str, str | ShardprepError] = {}
        self._seen: set[str] = set()

    def manifest(self) -> Manifest:
        manifest = remote_dataset(self._cache.place).manifest
        self._cache.folder.publish(manifest)
        self.folder = self._cache.folder.dataset(manifest.root)
        return manifest

    def prepare(self, entries: Sequence[FileEntry], level: str) -> None:
        if level != "quick":  # reading the files then shows more than their sizes
            self._cache.check_fits(entries)
            return
        remote = RemoteFolder(self._cache.place, PATIENT)

        async def ask(entry: FileEntry) -> None:
            try:
                stored = await remote.metadata(entry.name)
                self._issues[entry.name] = wrong_size(entry, stored.size) if stored else MISSING
            except ShardprepError as error:
                self._issues[entry.name] = error

        with LoopThread(threads=1) as loop:
            loop.run(run_all([partial(ask, entry) for entry in entries], DOWNLOADS_AT_ONCE))

    def find_issue(self, entry: FileEntry) -> str:
        issue = self._issues.get(entry.name, "")
        if isinstance(issue, ShardprepError):
            raise issue
        return issue

    @contextmanager
    def provide(self, entry: FileEntry) -> Iterator[Path]:
        """Yield the path of a cached file; one cached before is also read at the URL."""
        with self._cache.hold_intact(entry) as held:
            if not held.has_downloaded and entry.name not in self._seen:
                self._cache.check_published(entry)
            self._seen.add(entry.name)
            yield self._cache.folder.path_of(entry)

    def most_at_once(self, sizes: Iterable[int]) -> int:
        return self._cache.room_bytes // max([1, *sizes])

    def check_others(self, report: Report, manifest: Manifest) -> None:
        """Check nothing: a URL may hold other files."""

    def stop(self) -> None:
        self._cache.close()


@dataclass(frozen=True)
class DatasetView:
    """The dataset at ``path`` as a machine with these ``versions`` sees it. Picklable.

    ``manifest`` is the SHA-256 of its manifest, ``archive_bytes`` the size of the archive with the images;
    None if this machine sees none.
    """

    path: Path
    manifest: str
    versions: Mapping[str, str]
    archive_bytes: int | None

    @classmethod
    def of_this_machine(cls, path: Path, *, decode: bool) -> Self:
        size = None
        with suppress(OSError):  # there is none, or its own check reports why it cannot be read
            size = (path / ARCHIVE_NAME).stat().st_size
        return cls(path.absolute(), hash_file(path / MANIFEST_NAME), _versions(decode=decode), size)

    def call(self, name: str, call: Callable[[], CheckResult]) -> CheckResult:
        """Make a call that reads the file ``name``.

        Raises OtherMachine unless this machine sees the same dataset and file, and has the same versions.
        """
        refuse_other_versions(self.versions, _versions(decode="OpenCV" in self.versions), "verification")
        try:
            issue = "" if hash_file(self.path / MANIFEST_NAME) == self.manifest else "its root differs"
            (self.path / name).lstat()
            here = (self.path / ARCHIVE_NAME).stat().st_size if self.archive_bytes is not None else None
            if here != self.archive_bytes:
                issue = f"{ARCHIVE_NAME} has another size"
        except OSError as error:
            issue = str(error)
        if issue:
            text = f"does not see the dataset ({issue}); mount it there at the same path"
            raise other_machine_error(text, self.path)
        return call()


def _versions(*, decode: bool) -> dict[str, str]:
    return {"shardprep": version("shardprep")} | ({"OpenCV": cv2.__version__} if decode else {})


@dataclass(frozen=True)
class _Verification:
    files: DatasetFiles
    report: Report
    manifest: Manifest
    workers: int | None
    executor: Executor | None
    progress: Progress

    def run(self) -> None:
        manifest, level = self.manifest, self.report.level
        if manifest.table(INDEX_NAME) is None:
            self._add_finding(MANIFEST_NAME, f"does not list {INDEX_NAME}, which every dataset needs")
        self.files.prepare(manifest.files, level)
        sound = [
            each for each in manifest.files if self._is_sound(each.name, partial(self.files.find_issue, each))
        ]
        has_archive = manifest.archive is None or self._is_sound(ARCHIVE_NAME, self._archive_issue)
        with report_errors(".", self.report):
            self.files.check_others(self.report, manifest)
        if level == "quick":
            return
        names = {entry.name for entry in sound}
        readers: dict[str, Callable[[Path, Manifest], Rows | None]] = {
            INDEX_NAME: read_index,
            BOXES_NAME: read_box_rows,
            **{each.table.name: partial(check_column, entry=each) for each in manifest.column_entries},
        }
        tables: dict[str, Rows | None] = {}  # the intact ones
        for entry in (file for file in sound if file.name in readers):
            with report_errors(entry.name, self.report), self.files.provide(entry):
                tables[entry.name] = readers[entry.name](self.files.folder, manifest)
        if level != "full":
            if (index := tables.get(INDEX_NAME)) is not None:
                for problem in false_claims(manifest, index):
                    self._add_finding(MANIFEST_NAME, problem)
            listed = manifest.table(QUARANTINE_NAME)
            if listed is None or QUARANTINE_NAME in names:
                provided = self.files.provide(listed) if listed else nullcontext()
                with report_errors(QUARANTINE_NAME, self.report), provided:
                    check_quarantine(self.files.folder, manifest)
        checks = self._make_checks({} if level == "full" else tables, has_archive=has_archive)
        for region in (check.region for name, check in checks.items() if name not in names):
            link = self.report.dataset.absolute() / ARCHIVE_NAME
            with report_errors(ARCHIVE_NAME, self.report):
                if region and hash_region(link, region) != region.sha256:
                    self._add_finding(ARCHIVE_NAME, changed_in(link, region))
        digests = self._run_checks([checks[name] for name in checks if name in names])
        if level == "full" or self.report.exit_code:
            return
        if content_root(digests[shard.name] for shard in manifest.shards) != manifest.records_root:
            self._add_finding(MANIFEST_NAME, "its content_root differs from that of the records")
        for column in manifest.column_entries:
            roots = (digests[file.name] for file in column.shards or (column.table,))
            if content_root(roots) != column.content_root:
                whose = f"its content_root of the column {column.field.name}"
                self._add_finding(MANIFEST_NAME, f"{whose} differs from that of the values")

    def _archive_issue(self) -> str:
        link, archive = self.report.dataset / ARCHIVE_NAME, self.manifest.archive
        issue = archive.find_issue(self.report.dataset) if archive else ""
        return issue and f"{os.path.realpath(link)} {issue}; {advice_for(link)}"

    def _is_sound(self, name: str, find_issue: Callable[[], str]) -> bool:
        issue: str | None = None
        with report_errors(name, self.report):
            issue = find_issue()
        if issue:
            self._add_finding(name, issue)
        return issue == ""

    def _add_finding(self, name: str, problem: str) -> None:
        self.report.findings.append(Finding(name, problem))

    def _make_checks(self, tables: Mapping[str, Rows | None], *, has_archive: bool) -> dict[str, FileCheck]:
        """Return the check of each file that has not been read as a table, by its name.

        Records and values are compared with the intact ``tables``, unless the archive of the images is not
        there.
        """
        manifest, folder, level = self.manifest, self.report.dataset.absolute(), self.report.level
        checks = {entry.name: FileCheck(folder / entry.name, entry, level) for entry in manifest.files}
        index = tables.get(INDEX_NAME)
        keys = None if index is None else np.ascontiguousarray(index["key"])
        regions = manifest.archive.regions if manifest.archive else (None,) * len(manifest.shards)
        ends = accumulate(shard.records for shard in manifest.shards)
        for number, (shard, end, region) in enumerate(zip(manifest.shards, ends, regions, strict=True)):
            part = slice(end - shard.records, end)
            of_shard = replace(
                checks[shard.name],
                container=manifest.container,
                keys=None if keys is None else keys[part],
                rows=None if index is None else index[part],
                number=number,
                has_images=manifest.has_images,
            )
            if has_archive:
                checks[shard.name] = replace(of_shard, region=region)
            for column in manifest.column_entries:
                table = tables.get(column.table.name)
                for entry in column.shards[number : number + 1]:
                    checks[entry.name] = replace(
                        of_shard,
                        path=folder / entry.name,
                        entry=entry,
                        rows=None if table is None else table[part],
                        field=column.field,
                    )
        for column in manifest.column_entries:
            own = checks.pop(column.table.name)
            if column.field.is_fixed:
                checks[own.entry.name] = replace(own, keys=keys, field=column.field)
        return {name: check for name, check in checks.items() if name not in (INDEX_NAME, BOXES_NAME)}

    def _run_checks(self, checks: Sequence[FileCheck]) -> dict[str, bytes]:
        """Make the checks, report the results in order, and return the digests by name.

        They are made in threads, or pickled and made on the executor. An unreadable file is reported without
        stopping the others. ExecutorFailed and OtherMachine stop everything.
        """
        room = dict(zip((s.name for s in self.manifest.shards), self.manifest.image_room, strict=True))
        files = [replace(each.entry, size=room.get(each.entry.name, each.entry.size)) for each in checks]
        sizes, ends = np.array([[file.size, max(1, file.records)] for file in files]).reshape(-1, 2).T
        records, size = sum(file.records for file in files if file.name in room), int(sizes.sum())
        wanted = usable_cpus() if self.workers is None else self.workers
        most = self.files.most_at_once(check.entry.size for check in checks)
        count = max(1, min(most, check_int(wanted, "workers", least=0)))
        results: dict[int, CheckResult] = {}
        places = iter(range(len(files)))
        calls = []
        if self.executor is not None:
            view = DatasetView.of_this_machine(self.report.dataset, decode=self.report.level == "decode")
            for check, file in zip(checks, files, strict=True):
                call = partial(_run_check, check, self.files, file.size, None)
                calls.append(ExecutorCall(partial(view.call, file.name, call), view.path, file.name))

        def submit(place: int) -> Future[Any]:
            if self.executor is not None:
                return calls[place].submit_to(self.executor)
            check = replace(
                checks[place], counts=Path(f"/proc/{os.getpid()}/fd/{shared.fileno()}"), place=place
            )
            return threads.submit(_run_check, check, self.files, files[place].size, children)

        def show() -> float:  # returns when to show it again: of many files, it takes longer than a check
            began = time.monotonic()
            done_bytes = round(counts @ (sizes / ends))  # with columns: they are of the records
            self.progress.at(records * done_bytes // max(1, size), done_bytes)
            return began + 20 * (time.monotonic() - began)

        title = "hash" if self.report.level == "full" else self.report.level
        with (
            WorkerPool(1) as children,  # called from the threads of the checks
            os.fdopen(memory_file(), "r+b") as shared,
            self.progress.task(title, records=records, size=size),
            ThreadPoolExecutor(count) as threads,
        ):
            counts = np.memmap(shared, np.int64, "w+", shape=(len(files) + 1,))[:-1]
            due = 0.0
            try:
                at_once = count + 1 if self.executor is None else self.workers or AT_ONCE
                with closing(completed_calls(lambda: next(places, None), submit, at_once)) as finished:
                    for done in finished:
                        if done is not None:
                            place, future = done
                            results[place] = calls[place].result_of(future) if calls else future.result()
                            counts[place] = ends[place]
                        elif time.monotonic() >= due:
                            due = show()
                show()
            except BaseException:
                children.kill()
                self.files.stop()
                raise
        for place in range(len(files)):
            results[place].add_to(self.report)
        return {file.name: results[place].digests for place, file in enumerate(files)}


def _run_check(check: FileCheck, files: DatasetFiles, size: int, children: WorkerPool | None) -> CheckResult:
    """Make a check of ``size`` bytes; its errors are findings, too.

    Records are read in one of the children, or in a new one if there are none, as on another machine.
    """
    result = CheckResult()
    with report_errors(check.entry.name, result):
        try:
            with files.provide(check.entry) as path:
                check = replace(check, path=path)
                if not check.reads_values:
                    return check.run()
                with WorkerPool(1) if children is None else nullcontext(children) as pool:
                    return run_in_child(check, SHARD_TIMEOUT_S + size / SLOWEST_BYTES_PER_SECOND, pool)
        except ShardDamaged as error:
            result.findings.append(Finding(check.entry.name, f"its container is unreadable: {error.message}"))
    return result
