"""Verification: is a dataset complete, intact, and what it says it is? Every finding, not the first."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import isolated
from .content_root import content_root
from .errors import DataError, ManifestDamaged, OperationError, UsageError
from .index import INDEX_NAME
from .manifest import MANIFEST_NAME, PROVENANCE_NAME, FileEntry, Manifest, read_manifest
from .pool import usable_cpus
from .progress import Progress, Silent
from .publish import hash_descriptor
from .shard_check import Checked, ShardCheck, check_shard
from .workplace import WORKPLACE_NAME

LEVELS = ("quick", "full", "records", "decode")

# A damaged tree can lead its library in a circle, which must end; a slow disk must not look like one.
PATIENCE_SECONDS = 600.0
SLOWEST_BYTES_PER_SECOND = 1e6


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: in which file, what, and with which record where one can be named."""

    file: str
    problem: str
    key: str | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.key, self.problem) if part)


@dataclass
class Report:
    """What a verification saw. ``findings`` are damage, ``unchecked`` is what could not be read."""

    dataset: Path
    level: str
    manifest: Manifest | None = None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 intact, 1 damaged or incomplete, 3 could not check all of it."""
        return 1 if self.findings else 3 if self.unchecked else 0

    def raise_for_findings(self) -> None:
        """Raise DataError or OperationError unless the dataset is intact."""
        if self.findings:
            more = f" (and {len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
            raise DataError(f"{self.findings[0]}{more}; prep repair rebuilds it", path=self.dataset)
        if self.unchecked:
            raise OperationError(f"could not check {self.unchecked[0]}", path=self.dataset)

    def to_json(self) -> dict[str, Any]:
        """The report for machines."""
        lists = {"findings": self.findings, "unchecked": self.unchecked, "notes": self.notes}
        return {
            "dataset": os.fspath(self.dataset),
            "level": self.level,
            "ok": self.exit_code == 0,
            "root": self.manifest.root if self.manifest else None,
            "content_root": self.manifest.content_root if self.manifest else None,
            "records": self.manifest.records if self.manifest else None,
            **{
                name: [{"file": f.file, "key": f.key, "problem": f.problem} for f in found]
                for name, found in lists.items()
            },
        }


def verify(
    dataset: str | os.PathLike[str],
    *,
    level: str = "full",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a dataset; never changes it, and never crashes on what it finds.

    ``quick``: all files are there with their sizes and nothing else is; ``full``: and every
    SHA-256 holds; ``records``: and every record's checksum, order, count and ``content_root``, read
    in processes of their own; ``decode``: and every image decodes. Raises UnknownVersion, UsageError.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")
    path = Path(dataset)
    if not path.is_dir():
        raise UsageError("is not a dataset folder", path=path)
    report = Report(path, level)
    try:
        report.manifest = read_manifest(path)
    except ManifestDamaged as error:
        report.findings.append(Finding(MANIFEST_NAME, error.message))
        return report
    _Verification(report, report.manifest, workers or usable_cpus(), progress or Silent()).run()
    return report


class _Verification:
    """One run over one dataset with an intact manifest."""

    def __init__(self, report: Report, manifest: Manifest, workers: int, progress: Progress) -> None:
        self.report = report
        self.manifest = manifest
        self.workers = workers
        self.progress = progress

    def run(self) -> None:
        sound = [entry for entry in self.manifest.files if self._is_sound(entry)]
        self.report.findings += _strangers(self.report.dataset, self.manifest)
        records = self.report.level in ("records", "decode")
        hashed = [e for e in sound if not (records and e in self.manifest.shards)]
        if self.report.level != "quick":
            self._hash(hashed)
        if records:
            self._check_records([e for e in sound if e in self.manifest.shards])

    def _is_sound(self, entry: FileEntry) -> bool:
        """Whether a file is there, regular, and of its size."""
        try:
            status = (self.report.dataset / entry.name).lstat()
        except FileNotFoundError:
            return self._found(entry.name, "is missing")
        if not stat.S_ISREG(status.st_mode):
            return self._found(entry.name, "is not a regular file")
        if status.st_size != entry.size:
            return self._found(entry.name, f"has {status.st_size} bytes, not {entry.size}")
        return True

    def _found(self, name: str, problem: str, key: str | None = None) -> bool:
        self.report.findings.append(Finding(name, problem, key))
        return False

    def _hash(self, entries: list[FileEntry]) -> None:
        for entry, digest in self._in_threads("hash", entries, self._hash_of):
            if digest != entry.sha256:
                self._found(entry.name, "its SHA-256 is not the manifest's")

    def _hash_of(self, entry: FileEntry) -> str:
        """Of the very file that was opened, whatever its name leads to meanwhile."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.report.dataset / entry.name, flags)
        try:
            return hash_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def _in_threads(
        self, title: str, entries: list[FileEntry], call: Callable[[FileEntry], Any]
    ) -> Iterator[tuple[FileEntry, Any]]:
        """Results in the entries' order; what cannot be read is noted, and does not stop the rest."""
        done_records = done_bytes = 0
        records, size = sum(e.records for e in entries), sum(e.size for e in entries)
        results: dict[str, Any] = {}
        pool = ThreadPoolExecutor(self.workers)
        with self.progress.task(title, records=records, size=size), pool:
            futures = {pool.submit(call, entry): entry for entry in entries}
            try:
                for future in as_completed(futures):
                    entry = futures[future]
                    done_records, done_bytes = done_records + entry.records, done_bytes + entry.size
                    self.progress.at(done_records, done_bytes)
                    self._collect(entry, future, results)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        yield from ((entry, results[entry.name]) for entry in entries if entry.name in results)

    def _collect(self, entry: FileEntry, future: Any, results: dict[str, Any]) -> None:
        try:
            results[entry.name] = future.result()
        except DataError as error:
            self._found(entry.name, f"its container is unreadable: {error.message}")
        except OperationError as error:
            self.report.unchecked.append(Finding(entry.name, error.message))
        except OSError as error:
            self.report.unchecked.append(Finding(entry.name, error.strerror or str(error)))

    def _check_records(self, shards: list[FileEntry]) -> None:
        checks = self._checks()
        digests: dict[str, bytes] = {}
        call: Callable[[FileEntry], Checked] = lambda e: isolated(  # noqa: E731
            PATIENCE_SECONDS + e.size / SLOWEST_BYTES_PER_SECOND, check_shard, checks[e.name]
        )
        for entry, checked in self._in_threads(self.report.level, shards, call):
            for key, problem in checked.problems:
                self._found(entry.name, problem, key)
            self.report.notes += [Finding(entry.name, note, key) for key, note in checked.notes]
            digests[entry.name] = checked.digests
        if self.report.exit_code == 0:
            self._check_content_root(digests[s.name] for s in self.manifest.shards)

    def _checks(self) -> dict[str, ShardCheck]:
        intact = INDEX_NAME not in {f.file for f in self.report.findings}
        checks, first = {}, 0
        for number, shard in enumerate(self.manifest.shards):
            checks[shard.name] = ShardCheck(
                path=self.report.dataset / shard.name,
                number=number,
                container=self.manifest.container,
                records=shard.records,
                sha256=shard.sha256,
                index=self.report.dataset / INDEX_NAME if intact else None,
                first=first,
                decode=self.report.level == "decode",
            )
            first += shard.records
        return checks

    def _check_content_root(self, digests: Iterable[bytes]) -> None:
        if content_root(digests) != self.manifest.content_root:
            self._found(MANIFEST_NAME, "its content_root is not that of the records")


def _strangers(dataset: Path, manifest: Manifest) -> list[Finding]:
    """What lies in the folder without belonging there."""
    known = {f.name for f in manifest.files} | {MANIFEST_NAME, PROVENANCE_NAME}
    if stat.S_ISDIR(_mode(dataset / WORKPLACE_NAME)):
        known.add(WORKPLACE_NAME)  # of a conversion that was killed when its manifest was there already
    return [
        Finding(name, "does not belong to the dataset")
        for name in sorted(path.name for path in dataset.iterdir())
        if name not in known
    ]


def _mode(path: Path) -> int:
    """A path's file type and mode, links not followed; 0 where nothing is there."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0
