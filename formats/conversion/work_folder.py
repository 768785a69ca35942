"""The state of an unfinished conversion on disk, from which another run can continue.

The folder ``.prep`` in an output holds the lock, the plan that a resumed conversion must have, the commit
records of finished shards, and the folder of the run that holds the lock. A finished conversion removes it.

The run's folder holds all unfinished files until they are published. A worker may outlive its run: it was
stopped, or its disk hung, when the run was killed. All files that it writes are in its run's folder. The
next run removes that folder before anything else, and its random name is never used again. From then on the
worker can neither make nor rename a file, and its open files have no name.

In the run's folder is a file of counters, one per shard: the number of its images that a worker has done.
Each worker writes its own counter, so that a count outlives the worker, and no other bytes: the workers may
be on several hosts that share the file system. The parent reads the progress from the file, and the image
that a dead worker was at.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.conversion.plan import PlannedShard, differences
from shardprep.formats.errors import OutputBusy, PlanMismatch, UsageError
from shardprep.formats.runtime.files import as_no_space, flush_file, naming, publish_bytes
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json
from shardprep.formats.runtime.owned import Descriptor, LockDescriptor, Owned
from shardprep.formats.shards.dataset import refuse_cached
from shardprep.formats.shards.manifest import WORK_FOLDER_NAME

_PREFIX = "run-"
ALIVE_NAME = "alive"  # a file that a run locks where several work in one folder
_HOST_CHARACTERS = 32
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


def make_run_folder(work_folder: Path) -> Path:
    """Make a folder with a unique name, which names the host and the process."""
    folder = work_folder / f"{_PREFIX}{_host()}-{os.getpid()}-{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def is_of_this_host(run: Path) -> bool:
    """Whether a run on a host of this name made that folder."""
    return run.name.removeprefix(_PREFIX).rsplit("-", 2)[0] == _host()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:_HOST_CHARACTERS]


def remove_run_folders(work_folder: Path) -> None:
    """Remove the folders of all runs. The caller holds the work folder's lock, so the other runs are dead."""
    for path in work_folder.iterdir():
        if path.name.startswith(_PREFIX):
            remove_run_folder(path)


def remove_dead_run_folders(work_folder: Path) -> None:
    """Remove the folders of runs that hold no lock on their file ``alive``. None is made meanwhile."""
    for path in work_folder.iterdir():
        if path.name.startswith(_PREFIX) and not _is_alive(path):
            remove_run_folder(path)


def _is_alive(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / ALIVE_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked in between would keep it
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def bytes_in_run_folders(work_folder: Path) -> int:
    """Return about how many bytes removing the folders frees; 0 if there is no work folder."""
    files = (path for path in work_folder.glob(f"{_PREFIX}*/*") if not path.parent.is_symlink())
    return sum(map(_bytes_of, files))


def _bytes_of(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:  # removed since it was listed
        return 0


def remove_run_folder(folder: Path) -> None:
    """Remove the folder, if it exists, and the files in it; a link in its place is removed, not followed."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):  # its run removed it since
        while not _is_removed(folder):
            pass  # a worker that still runs made another file; it cannot make the next one


def _is_removed(folder: Path) -> bool:
    """Remove the folder with its files; return false if a new file was made in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(descriptor) as found:
            names = [entry.name for entry in found]
        for name in names:
            _unlink(folder / name, descriptor)
    finally:
        os.close(descriptor)
    return remove_if_empty(folder)


def remove_if_empty(folder: Path) -> bool:
    """Remove a folder if it is empty; return whether it was."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
        return False
    return True


def _unlink(path: Path, folder: int) -> None:
    with suppress(FileNotFoundError):  # renamed since it was listed
        try:
            os.unlink(path.name, dir_fd=folder)
        except OSError as error:
            error.filename = os.fspath(path)
            raise


COUNTERS_NAME = "counters"

# Between two counts of a worker on another host than the run's, each of which goes to the server at once.
FAR_INTERVAL_S = 1.0


class ProgressCounters(Owned):
    """The parent's view of all counters."""

    def __init__(self, path: Path, shards: Sequence[PlannedShard]) -> None:
        self.shards = len(shards)
        self._path = path
        slots = 1 + max((s.number for s in shards), default=0)
        path.unlink(missing_ok=True)
        with naming(path), path.open("xb") as file:
            file.write(bytes(8 * slots))  # written, not truncated to size: room on the disk is taken
        self._image_bytes = np.zeros(slots)
        for shard in shards:
            extent = shard.extent
            self._image_bytes[shard.number] = extent.payload_bytes / extent.records

    def done(self, number: int) -> int:
        """Return the number of images done in a shard."""
        return int(self._counts()[number])

    def total(self) -> tuple[int, int]:
        """Return the number of images, and about the number of bytes, done in all shards."""
        counts = self._counts()
        return int(counts.sum()), int(counts @ self._image_bytes)

    def _counts(self) -> npt.NDArray[np.int64]:
        """Read the file. It is opened each time: NFS then shows what other hosts have written."""
        return np.fromfile(self._path, dtype="<i8")


class ShardCounter(Owned):
    """A worker's counter in the file.

    On the host of the run each count is written, and seen there at once. Another host, which may share the
    file by NFS, writes one a second: synchronously, for otherwise it would keep counts for itself, and with a
    descriptor that cannot read, since NFS may write the whole of a page that was read.
    """

    def __init__(self, path: Path, number: int) -> None:
        self._is_far = not is_of_this_host(path.parent)
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = path
        self._file = Descriptor(os.open(path, flags | os.O_DSYNC if self._is_far else flags))
        self._at = 8 * number
        self._count = self._written = 0
        self._next = monotonic() + FAR_INTERVAL_S

    def set(self, count: int) -> None:
        """Publish the number of images done."""
        self._count = count
        if self._is_far and monotonic() < self._next:
            return
        self._write()

    def close(self) -> None:
        """Publish the last number, and close the file."""
        try:
            if self._count != self._written:
                self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        with naming(self._path):
            os.pwrite(self._file.fileno(), self._count.to_bytes(8, "little"), self._at)
        self._written = self._count
        self._next = monotonic() + FAR_INTERVAL_S


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
        """Lock the output. Raises OutputBusy, UsageError if it is no folder, or one in a cache; OSError."""
        refuse_cached(self.output)
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
            f"holds an unfinished {work}: {differing}{here}; give the options that began it, choose another folder"
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
    """Raise UsageError for a link in place of a folder in an output: files elsewhere would be changed."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise UsageError("is a link or a file where a folder belongs; remove it", path=folder)


def remove_leftover(output: Path) -> None:
    """Remove the work folder of a run that was killed after it had finished the output.

    Raises OutputBusy, UsageError, OSError.
    """
    if (output / WORK_FOLDER_NAME).exists():
        with WorkFolder(output) as work_folder:
            work_folder.remove()


def finished_shards(output: Path) -> set[str]:
    """Return the names of the shards with a commit record; the next run keeps those that are intact."""
    return {path.stem for path in (output / WORK_FOLDER_NAME).glob("*.commit")}


@contextmanager
def noting_kept(kept: Callable[[], str], *, restarted: bool = False) -> Iterator[None]:
    """Add to an interruption, such as KeyboardInterrupt, a note of what the next run keeps.

    ``kept`` says that; an empty text, and an error, add no note. With ``restarted`` this run discarded
    what an earlier one had done, as the next run must not.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as interruption:
        if text := kept():
            interruption.add_note(f"{text}; run it again{', without restart,' * restarted} to continue")
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
