"""The folder of one run in a work folder, which holds all files until they are published.

A worker may outlive its run: it was stopped, or its disk hung, when the run was killed. All files that it
writes are in its run's folder. The next run removes that folder before anything else, and its random name
is never used again. From then on the worker can neither make nor rename a file, and its open files have no
name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

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
