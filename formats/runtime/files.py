"""Files: atomic writes, reads at offsets, opening without following links, owners of descriptors and locks.

All disk access goes through here, so a full disk, a changed file or a bad path raises one of this package's
errors.

Atomic writes: a file gets its final name only once it is complete and flushed. The order, tested by killing
the process at every system call, is: write elsewhere, flush, rename, flush the folder.

Reads: the system may return fewer bytes than requested, at a bad sector, on NFS or FUSE, or after a signal.
Only an empty read means the end of the file.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import fcntl
import functools
import gzip
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import threading
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self, SupportsIndex, TypeVar, overload

from shardprep.formats.errors import (
    DataError,
    NoSpace,
    NotCopyable,
    OperationError,
    ShardprepError,
    SourceDamaged,
    UnknownVersion,
    UsageError,
)
from shardprep.formats.runtime import open_streams
from shardprep.formats.runtime.progress import check_flags

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801 - it replaces the standard one
    """``functools.cached_property`` of Python 3.12, for earlier versions.

    These hold one lock for all objects while they compute a value: a process forked in the meantime would
    wait for it forever. Without it, two threads may compute the same value.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        value = vars(instance)[str(self.attrname)] = self.func(instance)
        return value


class Closable:
    """Base of what a context closes at its end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Owner:
    """Base of owners, which cannot be copied: ``copy`` and ``pickle`` raise NotCopyable at once.

    ``copy_advice`` is the error's advice. In a forked copy of the process that made it, an owner must not be
    used, and releases nothing.
    """

    copy_advice: ClassVar[str] = "make a new one where it is needed"

    _pid: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        owner = super().__new__(cls)
        object.__setattr__(owner, "_pid", os.getpid())  # subclasses may be frozen dataclasses
        return owner

    @property
    def was_made_here(self) -> bool:
        """Whether this process made the object, not one that it was forked from."""
        return self._pid == os.getpid()

    def refuse_forked(self, name: str) -> None:
        """Raise UsageError, which calls this ``name``, in a forked copy of the process that made it."""
        if not self.was_made_here:
            raise UsageError(f"this {name} belongs to the process that forked this one; make another")

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Raise NotCopyable; ``copy`` and ``pickle`` call this first."""
        raise not_copyable_error(self, self.copy_advice)


def not_copyable_error(owner: object, advice: str) -> NotCopyable:
    return NotCopyable(
        f"a {type(owner).__name__} cannot be copied or pickled, because what it owns exists only once; "
        f"{advice}"
    )


class Descriptor(Owner):
    """A descriptor that is closed once, at the latest by its finalizer, and only in the opening process.

    In a forked copy of that process the number may belong to another file, because a daemon closes all
    inherited descriptors. Closing takes no lock.
    """

    _number = -1
    _is_finalizing = staticmethod(sys.is_finalizing)  # kept when modules are cleared at the program's end

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return the descriptor's number; -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Close the descriptor, unless this process is a forked copy, or is ending. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0 and not self._is_finalizing() and self.was_made_here:
            os.close(number)

    def __del__(self) -> None:
        if not self._is_finalizing():  # the system closes the descriptor then
            self.close()


_locks: weakref.WeakSet[LockDescriptor] = weakref.WeakSet()


def _close_inherited_locks() -> None:
    """In a forked copy of this process, close the locks, which it would hold for as long as it lives."""
    for lock in _locks:
        number, lock._number = lock._number, -1  # the number may be reused from here on
        with suppress(OSError):
            os.close(number)


os.register_at_fork(after_in_child=_close_inherited_locks)


class LockDescriptor(Descriptor):
    """A descriptor of a file locked with ``flock``. A forked copy of the process closes it at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        _locks.add(self)

    def lock(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Take or convert the lock, by default waiting for others; return whether it is held.

        Converting a lock is not atomic: another process may hold it in between. Raises OperationError if
        the file system has no locks.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fileno(), kind if wait else kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise OperationError(
                f"cannot be locked ({error.strerror}): mount its file system with locks (Lustre: -o flock), or "
                "choose a folder on another one",
                path=Path(f"/proc/self/fd/{self.fileno()}").readlink(),
            ) from error

    def close(self) -> None:
        """Release the lock, also for copies of the descriptor, and close it. Idempotent."""
        if self.fileno() >= 0 and self.was_made_here:
            with suppress(OSError):  # where there are no locks
                fcntl.flock(self.fileno(), fcntl.LOCK_UN)
        super().close()


class Finalizer(Owner):
    """Calls ``end`` once: when this is called, when ``owner`` is garbage-collected, or at program exit.

    Garbage collection may run in any thread, even one that holds a lock that ``end`` waits for, so it calls
    ``end`` in a new thread. ``end`` must not refer to the owner.
    """

    def __init__(self, owner: object, end: Callable[[], object]) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, _end_collected, end)

    @property
    def has_run(self) -> bool:
        return not self._finalizer.alive

    def __call__(self) -> None:
        if self._finalizer.detach():
            self._end()


def _end_collected(end: Callable[[], object]) -> None:
    if threading.main_thread().is_alive():
        _thread.start_new_thread(end, ())  # unlike threading.Thread, it takes no locks
    else:  # at program exit, in the main thread, which threading counts as ended
        end()


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


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MISSPELT = re.compile(r"(s3|gs|az|https?|file):|[^/\s:@]+:[^/\s@]*@")
_SECRETS = re.compile(r"(?<=://)[^/?#\s]*@|[^/\s:@]+:[^/\s@]*@|[?#][^\s\"')>]*|;[^/\s=;]+=[^/\s\"')>]*")


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return the path with a leading ``~`` or ``~name`` expanded, unless there is no such user.

    Raises UsageError for an empty string (such as an unset variable), for a null character, for a URL, and
    for a misspelt URL, unless a file has that name.
    """
    if not isinstance(path, str | os.PathLike) or path == "" or "\0" in os.fsdecode(path):
        raise UsageError(f"a path is needed here, not {path!r}; '.' is the current folder")
    if isinstance(path, str) and (url := _URL.match(path)):  # the rest may contain a secret
        place = f"not a URL that begins with {url[0]} (prep fetch copies a dataset from there)"
        raise UsageError(f"a path on this machine is needed here, {place}")
    if isinstance(path, str) and _MISSPELT.match(path) and not os.path.lexists(path):
        raise UsageError(
            "looks like a misspelt URL: write SCHEME://PLACE/FOLDER with the credentials in the "
            "environment, or begin a path of this name with ./",
            path=redact(path),
        )
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def user_paths(paths: Iterable[str | os.PathLike[str]], name: str) -> list[Path]:
    """Return the paths of the argument ``name`` as :func:`user_path` does. Raises UsageError for one path."""
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):  # one path
        raise UsageError(f"{name} must be a list of paths, such as [{paths!r}]")
    return [user_path(path) for path in paths]


def caches_folder() -> Path:
    """Return the folder of this user's caches, which may not exist. Raises RuntimeError without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "shardprep"


def redact(text: str) -> str:
    """Return the text without the credentials, queries, fragments and parameters of its URLs.

    >>> redact("GET https://me:secret@host/train?sig=secret failed")
    'GET https://…@host/train?… failed'
    >>> redact("http:me:secret@host/train;token=secret")
    '…@host/train;…'
    """
    return _SECRETS.sub(lambda match: f"{match[0][0]}…" if match[0][0] in "?#;" else "…@", text)


MAX_KEY_FILE_BYTES = 1 << 14  # of a key file, which has about 300


@dataclass(frozen=True)
class KeyPair:
    """The two files of a key pair, and the public key's fingerprint, for comparing it by eye."""

    secret: Path
    public: Path
    fingerprint: str


def fingerprint(public: bytes) -> str:
    """Return 16 hexadecimal digits that identify a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def save_key_pair(secret: tuple[Path, bytes], public: tuple[Path, bytes], *, overwrite: bool) -> None:
    """Write both files of a key pair. Raises UsageError if one exists, unless it may be overwritten."""
    check_flags(overwrite=overwrite)
    for file, _ in (secret, public):
        if not overwrite and os.path.lexists(file):
            raise UsageError("exists already; choose another name, or overwrite it (--force)", path=file)
    # the public one first: if it cannot be written, an earlier secret key is still there
    save_bytes(*public, mode=0o644)
    save_bytes(*secret, mode=0o600)


def read_key_file(path: Path, advice: str) -> tuple[bytes, os.stat_result]:
    """Read a file, and return its status, too: it cannot be replaced between the two.

    Raises OperationError with the ``advice`` if it cannot be read, UsageError if it cannot be a key's.
    """
    try:
        descriptor = Descriptor(os.open(path, OPEN_FLAGS))
    except OSError as error:
        raise OperationError(f"{error.strerror}; {advice}", path=path) from None
    with closing(descriptor):
        status = os.fstat(descriptor.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("is not a regular file; name the key file itself", path=path)
        data = os.read(descriptor.fileno(), MAX_KEY_FILE_BYTES + 1)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise UsageError(f"has more than {MAX_KEY_FILE_BYTES} bytes, so it is not a key file", path=path)
    return data, status
