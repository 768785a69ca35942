"""The folder ``.prep`` in an output: the state of an unfinished conversion.

It holds the lock, the plan that a resumed conversion must have, the commit records of finished shards, and
the folder of the run that holds the lock, with unfinished files. A finished conversion removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME
from shardprep.formats.errors import OutputBusy, PlanMismatch, UsageError
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json
from shardprep.formats.system.atomic_write import flush_file, publish_bytes
from shardprep.formats.system.descriptor import LockDescriptor
from shardprep.formats.system.full_disk import as_no_space
from shardprep.formats.system.owned import Owned

from .plan import differences
from .run_folder import (
    ALIVE_NAME,
    make_run_folder,
    remove_dead_run_folders,
    remove_if_empty,
    remove_run_folder,
    remove_run_folders,
)

PLAN_NAME = "plan.json"
RESTART = ", or discard what it did with --restart (in Python restart=True)"
OUTPUT_FILES = re.compile(
    r"(shard|column-[A-Za-z0-9_.-]+)-\d{5,}\.(lmdb|h5|tar\.npy)|(index|boxes|column-[A-Za-z0-9_.-]+)\.npy|"
    r"(quarantine|provenance)\.json"
)


class WorkFolder(Owned):
    """A lock on an output folder. Not reusable, neither copyable nor picklable.

    One process holds it for itself, or several hold it ``shared``: these build shards and finish nothing.
    If an OSError for a full disk leaves the context, NoSpace is raised in its place, with what is used up.

    ``run`` is the folder in which this run builds files; it exists only within the context. Entering removes
    the folders of dead runs, and no others. Jobs that still work after their run ended can publish nothing.
    """

    run: Path

    def __init__(self, output: Path, *, shared: bool = False) -> None:
        self.output = output
        self.folder = output / WORK_FOLDER_NAME
        self._shared = shared
        self._lock: LockDescriptor | None = None
        self._alive: LockDescriptor | None = None

    def __enter__(self) -> Self:
        """Lock the output. Raises OutputBusy, UsageError if it is not a folder, OSError."""
        if self.output.exists() and not self.output.is_dir():
            raise UsageError("is not a folder", path=self.output)
        self.output.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.folder.mkdir()
        flush_file(self.output)
        flush_file(self.output.parent)
        self._take()
        return self

    def _take(self) -> None:
        try:
            refuse_link(self.folder)
            self._lock = self._take_lock(self.folder / "lock")
        except (BlockingIOError, FileNotFoundError) as error:  # missing: its owner finished and removed it
            raise OutputBusy("another process is working on this output", path=self.output) from error
        try:
            self._begin_run()
        except BaseException:
            self._release()
            raise

    def _begin_run(self) -> None:
        if not self._shared:
            remove_run_folders(self.folder)
            self.run = make_run_folder(self.folder)
            return
        with self.turn("beginning"):
            remove_dead_run_folders(self.folder)
            self.run = make_run_folder(self.folder)
            self._alive = _lock_file(self.run / ALIVE_NAME)
            self._alive.lock()

    @contextmanager
    def turn(self, name: str, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Do what ``name`` names alone among the processes that share the folder.

        ``waits`` is called before this one waits for another. A process that dies ends its turn.
        """
        if not self._shared:
            yield
            return
        lock = _lock_file(self.folder / f"{name}.lock")
        try:
            if not lock.lock(wait=False):
                waits()
                lock.lock()
            yield
        finally:
            lock.close()

    def _take_lock(self, path: Path) -> LockDescriptor:
        lock = _lock_file(path)
        try:
            if not lock.lock(shared=self._shared, wait=False):
                raise BlockingIOError
            if os.fstat(lock.fileno()).st_ino != path.stat().st_ino:
                raise BlockingIOError  # its owner finished and removed it after it was opened
        except OSError:
            lock.close()
            raise
        return lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None or not self.made_here:
            return
        full = as_no_space(error, self.output)  # checked before files are removed
        try:
            with suppress(OSError):  # the next run removes it, or reports why it cannot
                remove_run_folder(self.run)
        finally:
            self._release()
        if full is not None:
            raise full from error

    def _release(self) -> None:
        for lock in (self._alive, self._lock):
            if lock is not None:
                lock.close()
        self._alive = self._lock = None

    def claim(self, guard: dict[str, Any], *, work: str = "conversion") -> None:
        """Store the plan of this work, or check that it is the one begun here.

        Raises PlanMismatch, which names what differs.
        """
        with self.turn("planning"):
            refuse_other_plan(self.output, guard, work=work)
            path = self.folder / PLAN_NAME
            if not path.exists():
                publish_bytes(path, canonical_json(guard), self.run)

    def discard(self) -> None:
        """Remove all files of an unfinished conversion from the output, and nothing else."""
        for path in self.output.iterdir():
            if OUTPUT_FILES.fullmatch(path.name):
                path.unlink()
        self.clear()
        flush_file(self.output)

    def remove(self) -> None:
        """Remove the work folder, its lock last; the lock is still held."""
        self.clear()
        remove_run_folder(self.run)
        (self.folder / "lock").unlink()
        remove_if_empty(self.folder)  # it is not empty if another process has already made a lock in it

    def clear(self) -> None:
        """Remove the state of the work from the folder; the output and the lock stay."""
        for path in self.folder.iterdir():
            if path.name not in ("lock", self.run.name):
                path.unlink()


def _kind(*, shared: bool) -> int:
    return fcntl.LOCK_SH if shared else fcntl.LOCK_EX


def _lock_file(path: Path) -> LockDescriptor:
    return LockDescriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))


def refuse_other_plan(output: Path, guard: dict[str, Any], *, work: str = "conversion") -> None:
    """Raise PlanMismatch, which names what differs, if other work was begun in the output.

    ``work`` names this work; a conversion can be told to restart.
    """
    path = output / WORK_FOLDER_NAME / PLAN_NAME
    if not path.exists():
        return
    begun = _parsed(path)
    if differing := differences(begun, guard):
        here = f" on the machine {socket.gethostname()}" if "writer was" in differing else ""
        raise PlanMismatch(
            f"holds an unfinished {work}: {differing}{here}; repeat the command that began it, choose another folder"
            + (RESTART if work == "conversion" else ""),
            path=output,
        )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        begun: dict[str, Any] = parse_canonical_json(path.read_bytes())
    except ValueError as error:
        raise PlanMismatch(
            f"cannot be read ({error}); --restart (in Python restart=True) discards the unfinished work",
            path=path,
        ) from error
    return begun


def refuse_link(folder: Path) -> None:
    """Raise UsageError for a link in place of the work folder: files elsewhere would be removed."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise UsageError("is not a folder but should be; remove it", path=folder)


def finished_shards(output: Path) -> set[str]:
    """Return the names of the shards with a commit record; the next run keeps those that are intact."""
    return {path.stem for path in (output / WORK_FOLDER_NAME).glob("*.commit")}


@contextmanager
def noting_kept(kept: Callable[[], str], command: str = "the same command") -> Iterator[None]:
    """Add to an interruption, such as KeyboardInterrupt, a note of what the next run keeps.

    ``kept`` says that; an empty text, and an error, add no note. ``command`` is what goes on from there.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as interruption:
        if text := kept():
            interruption.add_note(f"{text}; {command} goes on from there")
        raise


def refuse_busy(output: Path, *, shared: bool = False) -> None:
    """Raise OutputBusy if another process holds the output, before any work is done.

    ``shared`` is whether this work shares the output with others that share it.
    """
    try:
        descriptor = os.open(output / WORK_FOLDER_NAME / "lock", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(descriptor, _kind(shared=shared) | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked in between would keep it
    except BlockingIOError as error:
        raise OutputBusy("another process is working on this output", path=output) from error
    finally:
        os.close(descriptor)
