"""Files: atomic writes, reads at offsets, opening without following links, and errors that name them.

All disk access goes through here, so a full disk, a changed file or a bad path raises one of this package's
errors.

Atomic writes: a file gets its final name only once it is complete and flushed. The order, tested by killing
the process at every system call, is: write elsewhere, flush, rename, flush the folder.

Reads: the system may return fewer bytes than requested, at a bad sector, on NFS or FUSE, or after a signal.
Only an empty read means the end of the file.
"""

from __future__ import annotations

import ctypes
import errno
import gzip
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from shardprep.formats.errors import (
    DataError,
    NoSpace,
    OperationError,
    ShardprepError,
    SourceDamaged,
    UnknownVersion,
)
from shardprep.formats.runtime import open_streams
from shardprep.formats.runtime.owners import Descriptor, Owner

MFD_CLOEXEC = 1  # of Linux's memfd.h


def memory_file() -> int:
    """Return a descriptor of an empty file in memory, freed with its last descriptor and map.

    Python as uv and conda build it lacks ``os.memfd_create``, which the C library has.
    """
    open_streams()
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardprep")
    libc = ctypes.CDLL(None, use_errno=True)
    if (descriptor := int(libc.memfd_create(b"shardprep", MFD_CLOEXEC))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; return the bytes read, fewer only at the end. Raises OSError."""
    done = 0
    while done < len(buffer) and (count := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += count
    return done


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes from ``offset``, fewer only at the file's end. Raises OSError."""
    data = piece = os.pread(descriptor, size, offset)
    while piece and len(data) < size:
        data += (piece := os.pread(descriptor, size - len(data), offset + len(data)))
    return data


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


Item = TypeVar("Item")
Result = TypeVar("Result")

ReadAt = Callable[[int, int], bytes]
"""``read_at(length, offset)`` returns ``length`` bytes from ``offset``, fewer only at the end."""

# O_NONBLOCK: opening a FIFO must not block.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def name_in_data_errors(path: Path, where: str = "") -> Iterator[None]:
    """Add the file and the place ``where`` in it to errors of its content."""
    try:
        yield
    except (DataError, UnknownVersion) as error:
        raise type(error)(f"{where}{error.message}", path=path) from error


@contextmanager
def name_in_os_errors(path: Path) -> Iterator[None]:
    """Set the file name of an OSError; Python sets it only when opening a file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def open_regular(path: Path, flags: int = OPEN_FLAGS, damaged: type[ShardprepError] = SourceDamaged) -> int:
    """Open a regular file. Raises ``damaged``, without blocking, for anything else."""
    fd = os.open(path, flags)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise damaged("is not a regular file; replace it with the file itself", path=path)


@dataclass(frozen=True, slots=True)
class Identity:
    """Size, mtime and inode of a file, to detect changes."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


CHANGED = "changed while it was read; stop other programs from writing to it, and start again"


class ArchiveFile(Owner, AbstractContextManager["ArchiveFile"]):
    """A regular file, read at offsets. Neither copyable nor picklable, not thread-safe.

    Entering raises SourceDamaged if the file is not the ``expected`` one, leaving if it was replaced or
    changed in the meantime.
    """

    def __init__(self, path: Path, expected: Identity | None = None) -> None:
        self.path = path
        self._expected = expected
        self._fd = Descriptor(-1)

    def __enter__(self) -> ArchiveFile:
        self._fd = Descriptor(open_regular(self.path))
        self.identity = Identity.of(os.fstat(self._fd.fileno()))
        if self._expected not in (None, self.identity):
            self._fd.close()
            raise SourceDamaged(CHANGED, path=self.path)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._fd.close()
        if kind is None:
            with suppress(FileNotFoundError):
                if Identity.of(self.path.stat()) == self.identity:
                    return
            raise SourceDamaged(CHANGED, path=self.path)

    @property
    def end(self) -> int:
        return self.identity.size

    def read_at(self, length: int, offset: int) -> bytes:
        """Read as :data:`ReadAt` does. Raises OSError with the file's name."""
        with name_in_os_errors(self.path):
            return read_at(self._fd.fileno(), length, offset)

    def map(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Call one after the other: parallel reads of a disk are not faster."""
        return map(call, items)

    def expect_random_reads(self) -> None:
        """Turn off the kernel's read-ahead: headers are 100 KB apart, and images are read later."""
        os.posix_fadvise(self._fd.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


READ_BYTES = 1 << 18  # fits the CPU cache; reusing one buffer avoids page faults
MAX_TEXT_BYTES = 64 << 20  # the largest file, LOC_val_solution.csv, has 50,000 lines


def read_small_file(
    path: Path, limit: int = MAX_TEXT_BYTES, damaged: type[ShardprepError] = SourceDamaged
) -> bytes:
    """Read a file. Raises ``damaged`` if it has more than ``limit`` bytes or is not a regular file."""
    with name_in_os_errors(path), os.fdopen(open_regular(path, damaged=damaged), "rb") as file:
        # not file.read(limit), which allocates all of it
        data = file.read() if os.fstat(file.fileno()).st_size <= limit else None
    if data is None or len(data) > limit:
        raise damaged(f"has more than {limit} bytes, too many for a file of this name", path=path)
    return data


def flush_file(path: Path) -> None:
    """Flush a file or folder to disk. An error is final: a flush that failed is not repeated."""
    with name_in_os_errors(path), closing(Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))) as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:  # shared folders of VirtualBox cannot flush a folder
            if error.errno != errno.EINVAL or not path.is_dir():
                raise


def make_read_only(path: Path) -> None:
    """Make a file read-only, as the umask allows, unless its file system fixes permissions, as SMB may."""
    with suppress(PermissionError):
        path.chmod(path.stat().st_mode & 0o444)


def publish(built: Path, final: Path) -> None:
    """Make a flushed file read-only and rename it durably to ``final``. Raises OperationError, OSError."""
    make_read_only(built)
    try:
        built.replace(final)
    except IsADirectoryError as error:
        raise OperationError("is a folder where a file belongs; move it away", path=final) from error
    flush_file(final.parent)


def temporary_path(folder: Path, name: str) -> Path:
    """Return a unique path in ``folder`` for the unfinished file ``name``."""
    return folder / f"{name}.{secrets.token_hex(8)}.tmp"


@contextmanager
def open_for_publishing(final: Path, folder: Path) -> Iterator[BinaryIO]:
    """Open a file in ``folder`` that is published as ``final`` at the end; an error leaves nothing behind."""
    built = temporary_path(folder, final.name)
    try:
        with name_in_os_errors(built), built.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(built, final)
    finally:
        built.unlink(missing_ok=True)


def publish_bytes(final: Path, data: bytes, folder: Path) -> None:
    """Write a small file, unfinished in ``folder``, and publish it as ``final``."""
    with open_for_publishing(final, folder) as file:
        file.write(data)


def check_replaceable(path: Path) -> None:
    """Raise OperationError if the path exists and is not a regular file."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OperationError("is not a regular file that can be replaced; choose another path", path=path)


def save_bytes(final: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file to a path that a user chose, atomically replacing a regular file there.

    It never has more permissions than ``mode``, less the umask. A write that fails or is interrupted leaves
    nothing behind. Raises OperationError if ``final`` is not a regular file, OSError.
    """
    check_replaceable(final)
    built, flags = temporary_path(final.parent, ""), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(built, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        built.replace(final)
        flush_file(final.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(final)) from error  # not of the unfinished file
    finally:
        built.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """Return ``sha256:<hex>`` of a file."""
    with name_in_os_errors(path), path.open("rb", buffering=0) as file:
        return hash_descriptor(file.fileno())


def hash_descriptor(descriptor: int, start: int = 0, stop: int | None = None) -> str:
    """Return ``sha256:<hex>`` of an open file from ``start`` to ``stop`` or its end; keep its position."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    position, end = start, sys.maxsize if stop is None else stop
    while count := os.preadv(descriptor, [buffer[: end - position]], position):
        digest.update(buffer[:count])
        position += count
    return "sha256:" + digest.hexdigest()


MOUNTS = Path("/proc/self/mountinfo")
_MOUNT = re.compile(r"^(?:[^ ]+ ){4}([^ ]+) .*? - ([^ ]+)", re.MULTILINE)
NETWORK_FILESYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "9p"),
    *("gpfs", "beegfs", "wekafs", "panfs", "pvfs2"),
)
LOCAL_FUSE = tuple(f"fuse.{name}" for name in ("fuse-overlayfs", "mergerfs", "bindfs", "gocryptfs", "encfs"))
"""User-space file systems over this machine's disks; any other may be a network file system."""


def nearest_folder(path: Path) -> Path:
    """Return the path if it is a folder, else its nearest parent that is one."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def disk_room(path: Path) -> tuple[int, int]:
    """Return the bytes of a path's disk, and those free; both unlimited for ramfs and read-only disks."""
    folder = nearest_folder(path)
    usage = shutil.disk_usage(folder)
    is_known = usage.total and not os.statvfs(folder).f_flag & os.ST_RDONLY
    return (usage.total, usage.free) if is_known else (sys.maxsize, sys.maxsize)


def filesystem_type(path: Path) -> str:
    """Return the kernel's name for the type of a path's file system."""
    target = nearest_folder(path).resolve()
    depth, name = 0, ""
    for escaped, kind in _MOUNT.findall(os.fsdecode(MOUNTS.read_bytes())):
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), escaped))
        if target.is_relative_to(point) and len(point.parts) >= depth:  # a later mount hides an earlier one
            depth, name = len(point.parts), kind
    return name


PASSED_ON_ERRORS = (ShardprepError, OSError, MemoryError)
"""Errors raised unchanged. A MemoryError is the system's: readers check every size before they use it."""


@contextmanager
def errors_as_damage(
    path: str | os.PathLike[str],
    advice: str,
    *,
    key: str | None = None,
    place: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Convert any Exception, except those in PASSED_ON_ERRORS, to SourceDamaged with ``path`` and ``key``.

    Its message has ``place()``, the text of a ValueError or the class of another exception, and ``advice``.
    Thread-safe; each context is for one use.
    """
    try:
        yield
    except PASSED_ON_ERRORS:
        raise
    except Exception as error:  # hostile bytes may cause any exception
        raise SourceDamaged(f"{place()}{reason_of(error)}; {advice}", path=path, key=key) from error


def reason_of(error: Exception) -> str:
    """Return the message about a file whose reader raised ``error``."""
    if isinstance(error, ValueError):
        return str(error)
    return f"it cannot be read ({type(error).__name__}: {error})"


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""The system's errors for a disk without room, for everyone or for this user."""


def full_disk_error(path: str | os.PathLike[str], number: int = errno.ENOSPC) -> NoSpace:
    """Return the error for a file on a disk without room; ``number`` is one of FULL_DISK.

    Call it before removing any file.
    """
    return NoSpace(full_disk_message(path, number), path=path)


@contextmanager
def errors_as_no_space(path: Path) -> Iterator[None]:
    """Convert an OSError in FULL_DISK to NoSpace for this path."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise full_disk_error(path, error.errno) from error


def full_disk_message(path: str | os.PathLike[str] | None, number: int) -> str:
    """Return the message for one of FULL_DISK: whether the quota, space or inodes ran out."""
    if number == errno.EDQUOT:
        return "the disk quota is used up; make room, or raise it, and try again"
    if path is not None:
        with suppress(OSError):
            disk = os.statvfs(nearest_folder(Path(os.fsdecode(path))))
            # f_files and f_favail are both 0 on file systems without a fixed number of inodes.
            if disk.f_files > 0 and disk.f_favail == 0 and disk.f_bavail > 0:
                return (
                    "the disk has free space but no free inodes: it holds as many files as it can; remove "
                    "some and try again"
                )
    return "the disk is full; make room and try again"


_PIECE = 1 << 20


class GzipStream(Owner, AbstractContextManager["GzipStream"]):
    """An inflating reader like ArchiveFile, at rising offsets only. Raises SourceDamaged past ``limit``."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self._limit, self._at = path, limit, 0

    def __enter__(self) -> GzipStream:
        self._packed = os.fdopen(open_regular(self.path), "rb")
        self._file = gzip.GzipFile(fileobj=self._packed)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._packed.close()

    @property
    def end(self) -> int:
        """One byte more than the limit: reading this far means exceeding it. The content may be shorter."""
        return self._limit + 1

    def read_at(self, length: int, offset: int) -> bytes:
        """Read as :data:`ReadAt` does, from the last read's end or beyond."""
        while self._at < offset and self._read(min(_PIECE, offset - self._at)):
            pass
        return self._read(length) if self._at == offset else b""

    def _read(self, length: int) -> bytes:
        with name_in_os_errors(self.path):
            try:
                data = self._file.read(length)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                message = f"cannot be inflated ({error}); download it again"
                raise SourceDamaged(message, path=self.path) from error
        self._at += len(data)
        if self._at > self._limit:
            raise SourceDamaged(
                f"inflates to more than {self._limit} bytes; it is not the official file", path=self.path
            )
        return data
