"""The exception hierarchy.

A class defined in another file is followed by that file's name. Exit codes are those of ``prep``.

::

    ShardprepError
    ├── UsageError  exit 2: the request has no meaning
    │   ├── PlanMismatch  OUTPUT holds the work of another plan
    │   ├── NotCopyable  a process, thread, file or socket cannot be copied
    │   └── Refused (loaders/machines/link.py)  the receiver trains on something else
    ├── DataError  exit 1: the data is damaged or incomplete
    │   ├── SourceDamaged  an archive or a file of the source is broken
    │   ├── SourceIncomplete  the source has fewer or more images than expected
    │   ├── LabelConflict  two authorities disagree about a label
    │   ├── BadImage  bytes that are not an intact image
    │   ├── BadTarget  a mask or boxes that do not fit their image
    │   ├── ManifestDamaged  manifest.json, or a table it lists, differs from what was published
    │   ├── ShardDamaged  a shard's container cannot be read
    │   │   └── ChildDied (formats/runtime/processes.py)  reading or decoding crashed a process
    │   ├── CorruptRecord  a record's bytes do not match its checksum
    │   ├── BadValue (formats/records/schema.py)  a value its column cannot hold
    │   ├── RemoteMissing (formats/storage/store.py)  a file is not in the bucket or on the server
    │   ├── RemoteDamaged (formats/storage/store.py)  a server sends a different file
    │   ├── BadItem (formats/conversion/save.py)  an item to save does not match the others
    │   └── FrameDamaged (loaders/machines/codec.py)  a malformed message
    ├── OperationError  exit 3: a check or an operation could not be completed: I/O, permission, space
    │   ├── DatasetNotFound  there is no such folder; also a FileNotFoundError
    │   ├── MissingExtra  a package of an extra is not installed; also an ImportError
    │   ├── OutputBusy  another process works on the same output
    │   ├── ExecutorFailed (formats/runtime/jobs.py)  an executor lost a job
    │   ├── OtherMachine (formats/runtime/jobs.py)  a worker's machine differs
    │   ├── NoSpace  the disk or a quota is full, or would be
    │   │   └── CacheTooSmall (formats/storage/cache.py)  its limit is too small
    │   ├── WorkerDied  a worker process ended before its work did
    │   ├── ChildLost (formats/runtime/processes.py)  a process was killed, or took too long
    │   ├── WorkFailed (loaders/engine/messages.py)  an exception that cannot be pickled
    │   ├── CacheBusy (formats/storage/cache_folder.py)  another process holds a cache's lock
    │   ├── RemoteFailed (formats/storage/store.py)  a bucket or a server does not answer
    │   │   ├── NothingThere (formats/storage/store.py)  there is no such bucket, folder or dataset
    │   │   ├── RemoteDenied (formats/storage/store.py)  it denies access
    │   │   ├── AnswerBroken (formats/storage/store.py)  its answer broke off
    │   │   │   └── OtherFile (formats/storage/store.py)  a file was replaced since it was last seen
    │   │   └── RangeRefused (formats/storage/store.py)  it does not serve byte ranges
    │   ├── SenderFailed (loaders/machines/ledger.py)  a sender reported an error, or is gone
    │   ├── ReceiverGone (loaders/machines/link.py)  the receiver is closed or gone
    │   ├── NotAdmitted (loaders/machines/keys.py)  the receiver does not know the sender's key
    │   └── WrongReceiver (loaders/machines/keys.py)  the receiver does not have the expected key
    └── UnknownVersion  exit 4: written in a format this release does not know
"""

from __future__ import annotations

import errno as error_numbers
import os
from pathlib import Path
from typing import Any, ClassVar

MAX_CHARACTERS = 1000  # two fit a log line; most systems allow paths of 4,096 bytes


def printable(text: str, most: int = MAX_CHARACTERS) -> str:
    r"""Return ``text`` as one printable line of at most ``most`` characters. Idempotent.

    Line breaks, control characters, lone surrogates, direction marks and invisible characters are escaped as
    in a string literal. In a longer text, "…" replaces the middle: an error begins with its location and
    ends with advice.

    >>> printable("n01440764\x1b[2J\n"), printable("0123456789", 5)
    ('n01440764\\x1b[2J\\n', '01…89')
    """
    if len(text) <= most:
        escaped = _escape(text)
        if len(escaped) <= most:
            return escaped
    head, tail = (most - 1) // 2, most // 2
    return f"{_escape(text[:most])[:head]}…{_escape(text[-most:])[-tail:]}"


def printable_lines(text: str) -> str:
    """Return ``text`` with each line made printable."""
    return "\n".join(map(printable, text.splitlines()))


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


TRACEBACK = "\nOriginal Traceback (most recent call last):\n"  # as in torch's ExceptionWrapper


class ShardprepError(Exception):
    """Base of this package's errors: where it happened, and what to do.

    ``path``, ``shard`` and ``key`` (of the record) are None if they do not apply. They and ``message`` may
    hold untrusted text of any length; ``str``, ``repr`` and notes show each as one printable line of at most
    1,000 characters (MAX_CHARACTERS). Errors are picklable, so a worker's error is raised in the parent with
    its own type. PyTorch recreates a DataLoader worker's error with the traceback as its message, whose lines
    are kept.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        shard: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path: str | None = None if path is None else os.fsdecode(path)
        self.shard = shard
        self.key = key

    def __str__(self) -> str:
        places = dict.fromkeys(p for p in (self.path, self.shard, self.key) if p)
        if self.key and self.path and self.path.endswith(f"/{self.key}"):
            del places[self.key]  # the path of an image in a folder ends with its key
        if self.message.startswith("Caught ") and TRACEBACK in self.message:
            return printable_lines(self.message)
        return ": ".join(map(printable, [*places, self.message]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def add_note(self, note: str) -> None:
        """Add a note, made printable line by line."""
        super().add_note(printable_lines(note))


class UsageError(ShardprepError):
    """Wrong usage: invalid options, or an unrecognised source."""

    exit_code = 2


class PlanMismatch(UsageError):
    """The output holds a conversion with another plan: other options, or a changed source."""


class NotCopyable(UsageError, TypeError):
    """An attempt to copy or pickle an object that owns a system resource; nothing was copied."""


class DataError(ShardprepError):
    """The data is damaged or incomplete."""

    exit_code = 1


class SourceDamaged(DataError):
    """An archive or a file of the source is damaged, or has forbidden content."""


class SourceIncomplete(DataError):
    """The source has fewer or more images than expected."""


class LabelConflict(DataError):
    """Two sources of labels (ground truth, folder names, known labels) disagree."""


class BadImage(DataError):
    """Bytes that are not an intact image of a supported kind."""


class BadTarget(DataError):
    """A mask or boxes whose kind or size does not fit the image."""


class ManifestDamaged(DataError):
    """manifest.json is missing, not canonical, or does not match its own root."""


class ShardDamaged(DataError):
    """A shard's container cannot be read, or has forbidden content."""


class CorruptRecord(DataError):
    """A record's bytes do not match its checksum."""


class OperationError(ShardprepError):
    """The system does not allow the operation: I/O, permissions, space."""

    exit_code = 3


class DatasetNotFound(OperationError, FileNotFoundError):
    """There is no folder where a dataset should be."""

    # with setters that set nothing, because Dask's pickles set all three
    errno: Any = property(lambda self: error_numbers.ENOENT, lambda self, value: None)
    filename: Any = property(lambda self: self.path, lambda self, value: None)
    strerror: Any = property(lambda self: self.message, lambda self, value: None)

    @classmethod
    def at(cls, folder: Path) -> DatasetNotFound:
        """Return the error for a folder that is missing, or is a file."""
        what = "is not a folder" if folder.exists() else "there is no such folder"
        return cls(f"{what}; give the path of a dataset, the folder that prep convert made", path=folder)


class MissingExtra(OperationError, ImportError):
    """A package of an optional extra is not installed."""

    @classmethod
    def of(
        cls, what: str, package: str, extra: str, *, path: str | os.PathLike[str] | None = None
    ) -> MissingExtra:
        """Return the error, with the command that installs the package."""
        advice = f"pip install 'shardprep[{extra}]'"
        return cls(f"{what} needs {package}, which is not installed: {advice}", path=path)


class OutputBusy(OperationError):
    """Another process is working on the same output."""


class NoSpace(OperationError):
    """The disk or this user's quota is full, or would be."""


class WorkerDied(OperationError):
    """A worker process died before its work was done; ``key`` is the record it was at."""


class UnknownVersion(ShardprepError):
    """A format version that this release does not know."""

    exit_code = 4
