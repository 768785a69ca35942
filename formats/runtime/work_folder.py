"""The folder ``.prep`` in an output, with unfinished work that the next run continues.

It contains the lock, the plan that a resumed run must match, the commit records of finished files, and the
folder of the run that holds the lock. It is removed when the work is finished.

The run's folder has all files until they are published. A worker may outlive its run, if it was stopped or
its disk hung while the run was killed, but writes only into that folder. The next run first removes the
folder, whose random name is never reused. From then on the worker can neither create nor rename files, and
its open files have no name.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from shardprep.formats.errors import NoSpace, OutputBusy, PlanMismatch, UsageError
from shardprep.formats.runtime.files import FULL_DISK, flush_file, full_disk_error, publish_bytes
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json
from shardprep.formats.runtime.owners import LockDescriptor, Owner
from shardprep.formats.runtime.progress import count_of

WORK_FOLDER_NAME = ".prep"
PLAN_NAME = "plan.json"
ALIVE_NAME = "alive"  # locked by each of several runs in one folder
CACHE_LOCK_NAME = "shardprep-cache.lock"  # also marks a folder as a cache

BUSY = "another process is working on this output; wait until it ends"
_PREFIX = "run-"
MAX_TRIES = 1000
# parts of a plan, most of them digests
NOT_OPTIONS = ("split", "source", "images", "items", "names", "boxes", "dataset")
# by a part of their plans; an export also names its dataset
KINDS_OF_WORK = {"joined to": "join", "to": "export", "split": "conversion", "dataset": "fetch"}
_FLAGS = {"container": "--format", "columns": "--column", "pairs": "--pair"}
_FLAGS |= {name: name for name in ("transcoder", "writer")}  # not chosen


def make_run_folder(work_folder: Path) -> Path:
    """Make a folder with a unique name, which contains the host and the process ID."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:32]
    folder = work_folder / f"{_PREFIX}{host}-{os.getpid()}-{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def bytes_in_run_folders(work_folder: Path) -> int:
    """Return about how many bytes removing the run folders frees; 0 without a work folder."""
    return sum(path.lstat().st_blocks * 512 for path in work_folder.glob(f"{_PREFIX}*/*"))


def remove_run_folder(folder: Path) -> None:
    """Remove the folder and its contents, if it exists. A link in its place is removed, not followed."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
    tried = 0
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # A worker that is still running made or renamed a file since the folder was listed, or FUSE keeps
            # a removed file under another name while it is open.
            tried += 1
            if tried == MAX_TRIES or error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                error.filename = os.fspath(folder / Path(os.fsdecode(error.filename or "")).name)
                raise


def _lock_file(path: Path) -> LockDescriptor:
    return LockDescriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))


def _is_locked(path: Path, *, shared: bool = False) -> bool:
    """Whether another process holds the lock in a way that excludes this one, perhaps ``shared``."""
    try:
        lock = LockDescriptor(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        return False
    with closing(lock):
        return not lock.lock(shared=shared, wait=False)


class WorkFolder(Owner):
    """A context that locks an output folder. Not reusable, neither copyable nor picklable.

    One process holds the lock exclusively, or several hold it ``shared``; those build shards, but finish
    nothing. The OSError of a full disk leaves the context as NoSpace, which says whether a quota, space or
    inodes ran out.

    ``run`` is the folder for this run's unfinished files, which exists only within the context. Entering
    removes the folders of dead runs only. Jobs that outlive their run cannot publish anything.
    """

    run: Path

    def __init__(self, output: Path, *, shared: bool = False) -> None:
        self.output = output
        self.folder = output / WORK_FOLDER_NAME
        self._shared = shared
        self._locks: list[LockDescriptor] = []

    def __enter__(self) -> Self:
        """Lock the output. Raises OutputBusy; UsageError if it is not a folder, or is in a cache; OSError."""
        refuse_cached(self.output)
        if self.output.exists() and not self.output.is_dir():
            raise UsageError("is not a folder", path=self.output)
        missing = [path for path in self.output.parents if not path.exists()]
        self.output.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.folder.mkdir()
        for path in (self.output, self.output.parent, *(each.parent for each in missing)):
            flush_file(path)
        try:
            if not self._try_lock():
                raise OutputBusy(BUSY, path=self.output)
            with self.critical_section("beginning"):
                for path in self.folder.glob(f"{_PREFIX}*"):
                    if not (self._shared and _is_locked(path / ALIVE_NAME)):
                        remove_run_folder(path)
                self.run = make_run_folder(self.folder)
                if self._shared:
                    self._locks.append(_lock_file(self.run / ALIVE_NAME))
                    self._locks[-1].lock()
        except BaseException:
            self._release()
            raise
        return self

    def _try_lock(self) -> bool:
        """Take the lock; return False if another process has it, or removed the lock file meanwhile."""
        path = self.folder / "lock"
        try:
            if not stat.S_ISDIR(self.folder.lstat().st_mode):  # writing would change files elsewhere
                message = "is a link or a file where a folder belongs; remove it"
                raise UsageError(message, path=self.folder)
            self._locks.append(lock := _lock_file(path))
            is_locked = lock.lock(shared=self._shared, wait=False)
            return is_locked and os.fstat(lock.fileno()).st_ino == path.stat().st_ino
        except FileNotFoundError:
            return False

    @contextmanager
    def critical_section(self, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A critical section ``name`` among the processes that share the folder.

        Calls ``on_wait`` before waiting for another process. The death of a process ends its turn.
        """
        if not self._shared:
            yield
            return
        with closing(_lock_file(self.folder / f"{name}.lock")) as lock:
            if not lock.lock(wait=False):
                on_wait()
                lock.lock()
            yield

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._locks or not self.was_made_here:
            return
        full: NoSpace | None = None
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            full = full_disk_error(error.filename or self.output, error.errno)  # before files are removed
        try:
            for alive in self._locks[1:]:  # on NFS and FUSE, a folder with an open file cannot be removed
                alive.close()
            with suppress(OSError):  # the next run removes it, or reports why not
                remove_run_folder(self.run)
        finally:
            self._release()
        if full is not None:
            raise full from error

    def _release(self) -> None:
        while self._locks:
            self._locks.pop().close()

    def claim(self, guard: dict[str, Any], *, work: str = "conversion") -> None:
        """Store the plan of this work. Raises PlanMismatch if work with another plan was begun here."""
        with self.critical_section("planning"):
            refuse_other_plan(self.output, guard, work=work)
            path = self.folder / PLAN_NAME
            if not path.exists():
                publish_bytes(path, canonical_json(guard), self.run)

    def discard(self, files: re.Pattern[str]) -> None:
        """Remove unfinished work, and the output's files with names that match ``files``."""
        for path in self.output.iterdir():
            if files.fullmatch(path.name):
                path.unlink()
        self.clear()
        flush_file(self.output)

    def remove(self) -> None:
        """Remove the work folder, the lock file last."""
        self.clear()
        remove_run_folder(self.run)
        (self.folder / "lock").unlink()
        self._release()  # on NFS and FUSE, a folder with an open file cannot be removed
        with suppress(OSError):  # another process has already made a lock in it
            self.folder.rmdir()

    def clear(self) -> None:
        """Remove the stored state of the work; keep the lock and the run's folder."""
        for path in self.folder.iterdir():
            if path.name not in ("lock", self.run.name):
                path.unlink()


def refuse_busy(output: Path, *, shared: bool = False) -> None:
    """Raise OutputBusy if another process holds the output, unless both it and this work are ``shared``."""
    if _is_locked(output / WORK_FOLDER_NAME / "lock", shared=shared):
        raise OutputBusy(BUSY, path=output)


def refuse_cached(dataset: Path) -> None:
    """Raise UsageError for a folder in a cache, which only the cache itself changes."""
    for cache in dataset.resolve().parents:
        if (cache / CACHE_LOCK_NAME).exists():
            raise UsageError(
                f"is in a cache, where nothing else is kept or repaired; run prep verify URL --cache {cache} "
                "to replace damaged copies",
                path=dataset,
            )


def refuse_other_plan(output: Path, guard: dict[str, Any], *, work: str = "conversion") -> None:
    """Raise PlanMismatch, which names the differences, if work with another plan was begun in the output.

    ``work`` names this work in the message; a conversion can be restarted.
    """
    path = output / WORK_FOLDER_NAME / PLAN_NAME
    if not path.exists():
        return
    begun = work
    try:
        plan = parse_canonical_json(path.read_bytes())
        begun = next((kind for part, kind in KINDS_OF_WORK.items() if part in plan), work)
        differing = describe_differences(plan, guard)
    except (ValueError, TypeError) as error:
        differing = f"its {PLAN_NAME} cannot be read ({error})"
    if differing and begun != work:
        raise PlanMismatch(
            f"holds an unfinished {begun}; run the command that began it again, or choose another folder",
            path=output,
        )
    if differing:
        discard = "discard what it did with --restart (in Python restart=True)"
        same = "use the versions" if differing.startswith("writer") else "give the options"
        raise PlanMismatch(
            f"holds an unfinished {work}: {differing}; {same} it was begun with, choose "
            f"another folder, or {discard if work == 'conversion' else 'remove this one'}",
            path=output,
        )


def describe_differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how the plan ``begun`` differs from the plan ``now``; empty if it does not.

    Names options with their old and new values. Names other parts only if no option differs, because their
    digests depend on the options.
    """
    names = [name for name in {**now, **begun} if begun.get(name) != now.get(name)]
    if "container" in names:
        names = [name for name in names if name != "writer"]  # each container has its own
    options = [name for name in names if name not in NOT_OPTIONS]
    changed = [f"{flag_of(name)} was {_format(name, begun)}, is now {_format(name, now)}" for name in options]
    return ", ".join(changed or [f"{name} changed" for name in names])


def flag_of(option: str) -> str:
    return _FLAGS.get(option, "--" + option.replace("_", "-"))


def _format(name: str, options: Mapping[str, Any]) -> str:
    value = options.get(name)
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    if name == "shard_size" and isinstance(value, int) and not value % (1 << 20):
        return f"{value >> 20}MiB"
    return str(value)


def remove_leftover(output: Path) -> None:
    """Remove the work folder of a run that was killed after finishing. Raises OutputBusy, UsageError."""
    if (output / WORK_FOLDER_NAME).exists():
        with WorkFolder(output) as work_folder:
            work_folder.remove()


def finished_shards(output: Path) -> set[str]:
    """Return the names of shards with a commit record. The next run keeps the intact ones."""
    return {path.stem for path in (output / WORK_FOLDER_NAME).glob("*.commit")}


def describe_finished(output: Path, names: Collection[str], done: str = "done") -> str:
    """Describe how many of these shards are finished, for :func:`add_resume_note`; empty for none."""
    finished = len(finished_shards(output).intersection(names))
    are = "is" if finished == 1 else "are"
    return f"{finished} of {count_of(len(names), 'shard')} {are} {done}" if finished else ""


@contextmanager
def add_resume_note(describe: Callable[[], str], *, restarted: bool = False) -> Iterator[None]:
    """Add a note on what the next run keeps to an interruption, such as KeyboardInterrupt.

    ``describe`` returns the note's text; an empty text adds no note, nor is one added to an Exception. With
    ``restarted``, the note says not to restart again.
    """
    try:
        yield
    except BaseException as interruption:
        if not isinstance(interruption, Exception) and (text := describe()):
            interruption.add_note(f"{text}; run it again{', without restart,' * restarted} to continue")
        raise
