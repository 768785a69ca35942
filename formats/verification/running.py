"""The files of a dataset to verify, and the running of their checks in processes or on an executor."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import NoReturn, ParamSpec, Self, TypeVar

import numpy as np

from shardprep.formats.errors import ManifestDamaged, UnknownVersion
from shardprep.formats.images.decode import crashes_decoder
from shardprep.formats.runtime.executors import (
    AT_ONCE,
    ExecutorCall,
    ExecutorFailed,
    OtherMachine,
    other_machine,
    refuse_other_versions,
)
from shardprep.formats.runtime.files import OPEN_FLAGS, Identity
from shardprep.formats.runtime.jobs import completed
from shardprep.formats.runtime.owned import Owned, starting_thread
from shardprep.formats.runtime.progress import Progress
from shardprep.formats.runtime.workers import Child, ChildDied, ChildLost, usable_cpus
from shardprep.formats.shards.files import FileEntry, Rows
from shardprep.formats.shards.in_place import ARCHIVE_NAME, Region
from shardprep.formats.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.verification.checks import (
    Check,
    CheckResult,
    ColumnShardCheck,
    ColumnTableCheck,
    ShardCheck,
)
from shardprep.formats.verification.report import Finding, Report, unfinished, unlisted

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


Outcome = Callable[[], T]
"""Returns, or raises, the result of a check."""


@dataclass(frozen=True)
class CheckRunner(Owned):
    """Runs calls that read one file each: in threads, or ``elsewhere`` if that is given.

    ``elsewhere`` is an executor, and the dataset as this machine sees it. ``workers`` is the number of calls
    at a time; None and 0 are one per usable CPU, or AT_ONCE elsewhere. ``end`` ends the calls of threads.
    """

    elsewhere: tuple[Executor, SeenDataset] | None
    workers: int | None
    progress: Progress
    end: Callable[[], None]

    def run(
        self, title: str, files: Sequence[FileEntry], calls: Sequence[Callable[[], T]]
    ) -> Iterator[tuple[FileEntry, Outcome[T]]]:
        """Make each file's call; once all are made, yield the files in order, each with its outcome.

        The progress counts the records and sizes of ``files``. The calls are picklable if there is an
        executor. Raises ExecutorFailed and OtherMachine, which end the rest.
        """
        outcomes: dict[int, Outcome[T]] = {}
        done_records = done_bytes = 0
        records, size = sum(e.records for e in files), sum(e.size for e in files)
        ran = self._in_threads(calls) if self.elsewhere is None else self._on(*self.elsewhere, files, calls)
        with self.progress.task(title, records=records, size=size), closing(ran) as made:
            for place, outcome in made:
                done_records, done_bytes = done_records + files[place].records, done_bytes + files[place].size
                self.progress.at(done_records, done_bytes)
                outcomes[place] = outcome
        yield from ((file, outcomes[place]) for place, file in enumerate(files))

    def _in_threads(self, calls: Sequence[Callable[[], T]]) -> Generator[tuple[int, Outcome[T]]]:
        with ThreadPoolExecutor(usable_cpus() if self.workers is None else max(1, self.workers)) as pool:
            try:
                with starting_thread():
                    futures = {pool.submit(call): place for place, call in enumerate(calls)}
                for future in as_completed(futures):
                    yield futures[future], future.result
            except BaseException:
                self.end()
                pool.shutdown(cancel_futures=True)
                raise

    def _on(
        self,
        executor: Executor,
        seen: SeenDataset,
        files: Sequence[FileEntry],
        calls: Sequence[Callable[[], T]],
    ) -> Generator[tuple[int, Outcome[T]]]:
        sent = (
            (place, ExecutorCall(partial(seen.called, file.name, call), seen.path, file.name))
            for place, (file, call) in enumerate(zip(files, calls, strict=True))
        )
        at_once = self.workers or AT_ONCE
        finished = completed(lambda: next(sent, None), lambda one: one[1].submitted(executor), at_once)
        with closing(finished):
            for done in finished:
                if done is not None:
                    (place, call), future = done
                    yield place, _outcome(call, future)


def _outcome(call: ExecutorCall[T], future: Future[T | Exception]) -> Outcome[T]:
    """Return the outcome of a check. Raises ExecutorFailed and OtherMachine, which are no finding."""
    try:
        value = call.value_of(future)
    except (ExecutorFailed, OtherMachine):
        raise
    except Exception as error:
        return partial(_raise, error)
    return lambda: value


def _raise(error: Exception) -> NoReturn:
    raise error


P = ParamSpec("P")


class IsolatedChecks(Owned, AbstractContextManager["IsolatedChecks"]):
    """Checks of files, each call in a separate process. Thread-safe; :meth:`end` kills the processes.

    A process is used again only if it found nothing: a damaged file may leave a library in disorder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self._idle: list[Child] = []
        self._has_ended = False

    def check(self, check: Check, timeout_s: float) -> CheckResult:
        """Return the findings of a check, with the images that crash the decoder.

        Raises ChildDied if reading the records crashes, ChildLost if a process is killed or takes longer,
        and OperationError if the system allows no further process.
        """
        try:
            return self._isolated(timeout_s, check.found)
        except ChildDied:
            if not check.decode:
                raise
        found = self._isolated(timeout_s, replace(check, decode=False).found)
        decoded = self._decoded(check, range(check.records), timeout_s)
        if not decoded.problems:
            decoded.notes.append(
                (None, "the decoder crashed on its images together, but on none of them alone")
            )
        found.add(decoded)
        return found

    def end(self) -> None:
        """Kill the processes at work; later calls raise ChildLost. May be called from any thread."""
        with self._lock:
            self._has_ended = True
            for child in self._running:
                child.kill()

    def _decoded(self, check: Check, ordinals: range, timeout_s: float) -> CheckResult:
        """Decode these images in one process; if it crashes, each half of them in another one."""
        try:
            return self._isolated(timeout_s, check.decoded, ordinals)
        except ChildDied as error:
            if len(ordinals) == 1:
                key = self._isolated(timeout_s, check.key_of, ordinals[0])
                return CheckResult(problems=[(key, crashes_decoder(error.signal))])
        half = len(ordinals) // 2
        found = self._decoded(check, ordinals[:half], timeout_s)
        found.add(self._decoded(check, ordinals[half:], timeout_s))
        return found

    def _isolated(self, seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        child = self._taken()
        is_clean = False
        try:
            made = child.call_within(seconds, call, *args, **kwargs)
            is_clean = isinstance(made, CheckResult) and made.found_nothing
            return made
        finally:
            self._give_back(child, is_clean=is_clean)

    def _taken(self) -> Child:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child()
        with self._lock:
            if not self._has_ended:
                self._running.add(child)
                return child
        child.__exit__(None, None, None)
        raise ChildLost("the verification was ended")

    def _give_back(self, child: Child, *, is_clean: bool) -> None:
        with self._lock:
            self._running.remove(child)
            if is_clean and not self._has_ended:
                self._idle.append(child)
                return
        child.__exit__(None, None, None)

    def __exit__(self, *exc: object) -> None:
        self.end()
        for child in self._idle:
            child.__exit__(*exc)
        self._idle.clear()


def isolated_check(check: Check, timeout_s: float) -> CheckResult:
    """Return what :meth:`IsolatedChecks.check` does, in processes that end with the call."""
    with IsolatedChecks() as checks:
        return checks.check(check, timeout_s)


def record_checks(
    report: Report, manifest: Manifest, index: Rows | None, tables: Mapping[str, Rows | None]
) -> dict[str, Check]:
    """Return the check of each file with records, by the file's name.

    ``index`` is the index, and ``tables`` the lengths of each column of varying sizes by its name, as far as
    they are intact.
    """
    keys = None if index is None else np.ascontiguousarray(index["key"])
    folder, decode, regions = report.dataset, report.level == "decode", regions_of(manifest)
    ends = list(accumulate(shard.records for shard in manifest.shards))
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    checks: dict[str, Check] = {
        shard.name: ShardCheck(
            path=folder / shard.name,
            records=shard.records,
            sha256=shard.sha256,
            decode=decode,
            number=number,
            container=manifest.container,
            rows=None if index is None else index[part],
            has_images=manifest.has_images,
            region=regions.get(shard.name),
        )
        for number, (shard, part) in enumerate(zip(manifest.shards, parts, strict=True))
    }
    for column in manifest.columns.entries if manifest.columns else ():
        field, table, rows = column.field, column.table, tables.get(column.table.name)
        if field.is_fixed:
            path = folder / table.name
            checks[table.name] = ColumnTableCheck(path, table.records, table.sha256, decode, field, keys)
        for shard, part in zip(column.shards, parts, strict=False):
            checks[shard.name] = ColumnShardCheck(
                path=folder / shard.name,
                records=shard.records,
                sha256=shard.sha256,
                decode=decode,
                field=field,
                keys=None if keys is None else keys[part],
                container=manifest.container,
                rows=None if rows is None else rows[part],
            )
    return checks


def regions_of(manifest: Manifest) -> dict[str, Region]:
    """Return the region of the archive that each shard's images are in, by its name; empty without one."""
    archive, names = manifest.archive, (shard.name for shard in manifest.shards)
    return dict(zip(names, archive.regions, strict=True)) if archive else {}


UNFINISHED = "belongs to an unfinished join; the same prep join continues it, another one removes it"
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
