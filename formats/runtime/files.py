"""Files: written atomically, read by position, and opened without following links.

All access to disks goes through here, so that a full disk, a changed file or a bad path is one of this
package's errors.

Atomic writing: a file has its final name only when it is complete and flushed. The order, tested by killing
at every system call: write elsewhere, flush, rename, flush the folder.

Reading and writing of a file at a position, independent of its descriptor's, up to the file's end. A read may
return fewer bytes than requested: at a bad sector of a disk, NFS or FUSE, or after a signal. Only a read of
no bytes is the end of a file.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import re
import secrets
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    UsageError,
)
from shardprep.formats.runtime.owned import Descriptor, Owned


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; return the number of bytes that the file had. Raises OSError."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes from ``offset``, fewer only if the file ends before. Raises OSError."""
    data = os.pread(descriptor, size, offset)
    if len(data) == size or not data:
        return data
    buffer = bytearray(size)
    buffer[: len(data)] = data
    view = memoryview(buffer)
    return bytes(view[: len(data) + read_into(descriptor, view[len(data) :], offset + len(data))])


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


Item = TypeVar("Item")
Result = TypeVar("Result")

ReadAt = Callable[[int, int], bytes]
"""``read_at(length, offset)`` returns the bytes there, fewer only if the data ends before."""

# O_NONBLOCK: opening a fifo in place of a file must not wait.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def naming_file(path: Path, where: str = "") -> Iterator[None]:
    """Name the file, and the place ``where`` in it, in the errors of what is read from it."""
    try:
        yield
    except (DataError, UnknownVersion) as error:
        raise type(error)(f"{where}{error.message}", path=path) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set the file's name in an OSError from reading; Python sets it only when opening."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def open_regular(path: Path) -> int:
    """Open a regular file. Raises SourceDamaged, without waiting, if it is something else."""
    return regular(os.open(path, OPEN_FLAGS), path)


def regular(fd: int, path: Path) -> int:
    """Return a regular file's descriptor. For anything else, close it and raise SourceDamaged."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise SourceDamaged("is not a regular file; replace it with the file itself", path=path)


@dataclass(frozen=True, slots=True)
class Identity:
    """Size, mtime and inode; a changed file differs in one of them."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


CHANGED = "changed while it was read; stop other programs from writing to it, and start again"


class ArchiveFile(Owned, AbstractContextManager["ArchiveFile"]):
    """A regular file open for reading by offset. Neither copyable nor picklable, not thread-safe.

    Entering raises SourceDamaged if the file is not the ``expected`` one; leaving raises it if the file was
    replaced or changed.
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
            raise self._changed()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._fd.close()
        if kind is None and self._identity_now() != self.identity:
            raise self._changed()

    @property
    def end(self) -> int:
        """The file's size in bytes."""
        return self.identity.size

    def read_at(self, length: int, offset: int) -> bytes:
        """Read like :data:`ReadAt`. Raises OSError with the file's name."""
        with naming(self.path):
            return read_at(self._fd.fileno(), length, offset)

    def mapped(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results of the calls, made in turn: a disk is not faster at several places."""
        return map(call, items)

    def expect_random_reads(self) -> None:
        """Keep the kernel from reading ahead: headers are 100 KB apart, and images are read later."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def _identity_now(self) -> Identity | None:
        try:
            return Identity.of(self.path.stat())
        except FileNotFoundError:
            return None

    def _changed(self) -> SourceDamaged:
        return SourceDamaged(CHANGED, path=self.path)


READ_BYTES = 1 << 18  # fits the CPU's cache; one buffer for all reads avoids page faults


def flush_file(path: Path) -> None:
    """Flush the file to the disk. An error is final: a flush is never repeated for the same file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(built: Path, final: Path) -> None:
    """Give a flushed file its final name, read-only, replacing an existing file; durable on return.

    Raises OperationError if there is a folder of that name, OSError.
    """
    built.chmod(0o444)
    try:
        built.replace(final)
    except IsADirectoryError as error:
        raise OperationError("is a folder where a file belongs; move it away", path=final) from error
    flush_file(final.parent)


def unfinished(folder: Path, name: str) -> Path:
    """Return a new path in ``folder`` for the unfinished file ``name``: no two attempts write one file."""
    return folder / f"{name}.{secrets.token_hex(8)}.tmp"


@contextmanager
def publishing(final: Path, folder: Path) -> Iterator[BinaryIO]:
    """Open a file to write in ``folder``; leaving without an error flushes and publishes it as ``final``.

    Nothing is left of one that fails or is interrupted.
    """
    built = unfinished(folder, final.name)
    try:
        with naming(built), built.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(built, final)
    finally:
        built.unlink(missing_ok=True)


def publish_bytes(final: Path, data: bytes, folder: Path) -> None:
    """Write a small file in ``folder`` and publish it."""
    with publishing(final, folder) as file:
        file.write(data)


def check_replaceable(path: Path) -> None:
    """Raise OperationError if a folder, a device or anything else but a regular file has this path."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OperationError("is not a regular file that can be replaced; choose another path", path=path)


def save_bytes(final: Path, data: bytes, *, mode: int = 0o666, is_new: bool = False) -> None:
    """Write a file where a user wants it, replacing a regular file at once.

    It never has more permissions than ``mode``, less the umask. Nothing is left of a write that fails or is
    interrupted. With ``is_new`` nothing is replaced: of two that save at once, one gets FileExistsError.
    Raises OperationError if something else than a regular file is there, OSError.
    """
    check_replaceable(final)
    built, flags = unfinished(final.parent, ""), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    left = [built]
    try:
        if is_new:
            os.close(os.open(final, flags, mode))
            left.append(final)
        with os.fdopen(os.open(built, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        built.replace(final)
        left.clear()
        flush_file(final.parent)
    except OSError as error:
        error.filename, error.filename2 = str(final), None  # not the unfinished file
        raise
    finally:
        for file_left in left:
            file_left.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """Return ``sha256:<hex>`` of a file, read to its end."""
    with naming(path), path.open("rb", buffering=0) as file:
        return hash_descriptor(file.fileno())


def hash_descriptor(descriptor: int, start: int = 0, stop: int | None = None) -> str:
    """Return ``sha256:<hex>`` of an open file from ``start`` to ``stop``, or its end.

    Does not move its position.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    position, end = start, sys.maxsize if stop is None else stop
    while count := os.preadv(descriptor, [buffer[: end - position]], position):
        digest.update(buffer[:count])
        position += count
    return "sha256:" + digest.hexdigest()


MOUNTS = Path("/proc/self/mountinfo")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "9p")


def existing_folder(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent folder."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def filesystem_type(path: Path) -> str:
    """Return the type of a path's file system, as the kernel names it; "" if it is unknown."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    target = existing_folder(path).resolve()
    best = (-1, "")
    for line in lines:
        mount, _, kind = line.partition(" - ")
        point = Path(mount.split(" ")[4].replace("\\040", " "))
        if target.is_relative_to(point):
            best = max(best, (len(point.parts), kind.split(" ")[0]))
    return best[1]


PASSING = (ShardprepError, OSError, MemoryError)
"""Errors that pass unchanged. A MemoryError is the system's: readers bound every size before its use."""


def _nowhere() -> str:
    return ""


@contextmanager
def foreign_file(
    path: str | os.PathLike[str],
    advice: str,
    *,
    key: str | None = None,
    place: Callable[[], str] = _nowhere,
) -> Iterator[None]:
    """Raise SourceDamaged for any Exception but those of PASSING, with that as its cause.

    ``path``, ``key`` and ``place()``, which begins the message, name the place; ``advice`` is what to do. The
    text of a ValueError is used as the message; for other exceptions the class is named. Thread-safe; one
    context is for one use.
    """
    try:
        yield
    except PASSING:
        raise
    except Exception as error:  # hostile bytes may cause any exception; it stays visible as the cause
        raise SourceDamaged(f"{place()}{reason_of(error)}; {advice}", path=path, key=key) from error


def reason_of(error: Exception) -> str:
    """Return a reader's exception as a message about its file."""
    if isinstance(error, ValueError):
        return str(error)
    return f"it cannot be read ({type(error).__name__}: {error})"


def no_space(path: str | os.PathLike[str]) -> NoSpace:
    """Return the error for a file on a full disk. Call it before anything is removed."""
    return NoSpace(advice(path), path=path)


def as_no_space(error: BaseException | None, path: Path) -> NoSpace | None:
    """Return NoSpace for an error of a full disk, None for any other; without a file, it names ``path``."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return None
    return no_space(error.filename or path)


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Raise NoSpace, for this path, in the place of an OSError of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_space(path) from error


def advice(path: str | os.PathLike[str] | None) -> str:
    """Return whether space or inodes ran out on the disk of that file, and what to do."""
    if path is not None and _has_no_inodes(Path(os.fsdecode(path))):
        return (
            "the disk has free space but no free inodes: it holds as many files as it can; remove some and "
            "try again"
        )
    return "the disk is full; make room and try again"


def _has_no_inodes(path: Path) -> bool:
    place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    try:
        disk = os.statvfs(place)
    except OSError:
        return False
    return disk.f_files > 0 and disk.f_favail == 0 and disk.f_bavail > 0  # without a fixed number, both are 0


_PIECE = 1 << 20


class GzipStream(Owned, AbstractContextManager["GzipStream"]):
    """A reader like ArchiveFile, at rising offsets only. Raises SourceDamaged beyond ``limit`` bytes."""

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
        """One byte more than the limit, so that reading to the end exceeds it; the content may end before."""
        return self._limit + 1

    def read_at(self, length: int, offset: int) -> bytes:
        """Return the bytes there, fewer if the content ends before. Raises ValueError for a lower offset."""
        if offset < self._at:
            raise ValueError("a stream cannot be read backwards")
        while self._at < offset and self._read(min(_PIECE, offset - self._at)):
            pass
        return self._read(length) if self._at == offset else b""

    def _read(self, length: int) -> bytes:
        with naming(self.path):
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


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ON_THE_WAY = _FOLDER | getattr(os, "O_PATH", 0)  # O_PATH is faster, and needs no read permission
_FILE = OPEN_FLAGS | os.O_NOFOLLOW


def open_folder(path: str | os.PathLike[str]) -> int:
    """Open a folder. Raises OSError (ENOTDIR, ELOOP) if the last part of the path is a link."""
    return os.open(path, _FOLDER)


def open_folder_below(folder: int, place: bytes) -> int:
    """Open a folder by its path below another one; none of its parts may be a link."""
    return _opened(folder, place, _FOLDER)


def open_below(folder: int, place: bytes) -> int:
    """Open a file for reading in the same way."""
    return _opened(folder, place, _FILE)


def _opened(folder: int, place: bytes, flags: int) -> int:
    *on_the_way, name = place.split(b"/")
    here = folder
    try:
        for part in on_the_way:
            inner = os.open(part, _ON_THE_WAY, dir_fd=here)
            if here != folder:
                os.close(here)
            here = inner
        return os.open(name, flags, dir_fd=here)
    finally:
        if here != folder:
            os.close(here)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MISSPELT = re.compile(r"(s3|gs|az|https?|file):|[^/\s:@]+:[^/\s@]*@")
_SECRETS = re.compile(r"(?<=://)[^/?#\s]*@|[^/\s:@]+:[^/\s@]*@|[?#][^\s\"')>]*|;[^/\s=;]+=[^/\s\"')>]*")


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return the path; a ``~`` or ``~name`` at its beginning is that user's home folder.

    Where there is no such user, the path is taken as it is. Raises UsageError for an empty text, as of an
    unset variable, for the text of a URL, which would be the path of another place, and for one that is
    misspelt, unless there is a file of that name.
    """
    if path == "":
        raise UsageError("a path is needed here, not an empty text; write . for the current folder")
    if isinstance(path, str) and (url := _URL.match(path)):  # the rest may hold a secret
        raise UsageError(f"a path on this machine is needed here, not a URL that begins with {url[0]}")
    if isinstance(path, str) and _MISSPELT.match(path) and not os.path.lexists(path):
        raise UsageError(
            "looks like a misspelt URL: write SCHEME://PLACE/FOLDER with the credentials in the "
            "environment, or begin a path of this name with ./",
            path=redacted(path),
        )
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def redacted(text: str) -> str:
    """Return a text in which users, queries, fragments and parameters of URLs are left out.

    >>> redacted("GET https://me:secret@host/train?sig=secret failed")
    'GET https://…@host/train?… failed'
    >>> redacted("http:me:secret@host/train;token=secret")
    '…@host/train;…'
    """
    return _SECRETS.sub(lambda found: f"{found[0][0]}…" if found[0][0] in "?#;" else "…@", text)
