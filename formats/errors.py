"""Everything that can go wrong, as one tree.

A class that is defined beside its only use is followed by its file. The exit code is that of ``prep``.

::

    ShardprepError
    ├── UsageError  exit 2: the request has no meaning
    │   ├── PlanMismatch  OUTPUT holds the work of another plan
    │   ├── NotCopyable  an object that owns a process, thread, file or socket was to be copied
    │   └── Refused (loaders/machines/link.py)  the receiver trains on something else
    ├── DataError  exit 1: the data is damaged or incomplete
    │   ├── SourceDamaged  an archive or a file of the source is broken
    │   ├── SourceIncomplete  the source has another number of images than it should
    │   ├── LabelConflict  two authorities disagree about a label
    │   ├── BadImage  bytes that are not an intact image
    │   ├── BadTarget  a mask or boxes that do not fit their image
    │   ├── ManifestDamaged  manifest.json, or a table that it lists, is not what was published
    │   ├── ShardDamaged  a shard's container cannot be read
    │   │   └── ChildDied (formats/runtime/workers.py)  reading or decoding crashed a process
    │   ├── CorruptRecord  a record's bytes do not match its checksum
    │   ├── BadValue (formats/records/codecs.py)  a value that its column cannot hold
    │   ├── RemoteMissing (formats/storage/store.py)  a file is not in the bucket or on the server
    │   ├── RemoteDamaged (formats/storage/transfer.py)  a server sends another file
    │   ├── BadItem (formats/conversion/save.py)  an item to save that does not fit the others
    │   └── FrameDamaged (loaders/machines/codec.py)  a message that is not a frame
    ├── OperationError  exit 3: a check or an operation could not be done: I/O, permission, space
    │   ├── DatasetNotFound  there is no such folder; also a FileNotFoundError
    │   ├── MissingExtra  a package of an extra is not installed; also an ImportError
    │   ├── OutputBusy  another process works on the same output
    │   ├── ExecutorFailed (formats/runtime/executors.py)  an executor lost a job
    │   ├── OtherMachine (formats/runtime/executors.py)  a worker's machine differs
    │   ├── NoSpace  the disk is, or would get, full
    │   │   └── CacheTooSmall (formats/storage/cache.py)  its limit is too small
    │   ├── WorkerDied  a worker process ended before its work did
    │   ├── ChildLost (formats/runtime/workers.py)  a process was killed, or took too long
    │   ├── WorkFailed (loaders/engine/messages.py)  an exception that cannot be pickled
    │   ├── CacheBusy (formats/storage/cache_folder.py)  another process keeps a cache's lock
    │   ├── RemoteFailed (formats/storage/store.py)  a bucket or a server does not answer
    │   │   ├── NothingThere (formats/storage/store.py)  there is no such bucket, folder or dataset
    │   │   ├── RemoteDenied (formats/storage/store.py)  it gives no access
    │   │   ├── AnswerBroken (formats/storage/store.py)  its answer broke off
    │   │   │   └── OtherFile (formats/storage/store.py)  a file is not the one that was there before
    │   │   └── RangeRefused (formats/storage/store.py)  it sends no parts of files
    │   ├── SenderFailed (loaders/machines/frames.py)  a sender reported an error, or is gone
    │   ├── ReceiverGone (loaders/machines/link.py)  the receiver is closed or gone
    │   ├── NotAdmitted (loaders/machines/keys.py)  the receiver does not know the sender's key
    │   ├── WrongReceiver (loaders/machines/keys.py)  the receiver does not have the expected key
    │   └── ConnectionDamaged (loaders/machines/keys.py)  a connection carried what is not ZeroMQ's
    └── UnknownVersion  exit 4: written by a release that this one does not know
"""

from __future__ import annotations

import errno as error_numbers
import os
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

MOST_CHARACTERS = 1000  # two fit a line of a log; the longest path of most systems has 4,096 bytes


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Return ``text`` on one line, in at most ``most`` characters. Idempotent.

    Characters that are not printable are escaped as in a string literal: line breaks, control characters,
    lone surrogates, changes of direction and invisible characters. In a longer text "…" replaces the
    middle, so that both ends are shown: the place of an error, and what to do.

    >>> printable("n01440764\x1b[2J\n"), printable("0123456789", 5)
    ('n01440764\\x1b[2J\\n', '01…89')
    """
    if len(text) <= most:
        shown = _escaped(text)
        if len(shown) <= most:
            return shown
    kept = most - 1
    return f"{_escaped(text[:most])[: kept // 2]}…{_escaped(text[-most:])[-(kept - kept // 2) :]}"


def printable_lines(text: str) -> str:
    """Return ``text`` with each of its lines made printable."""
    return "\n".join(map(printable, text.splitlines()))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


MOST_NAMED = 5
MOST_NEIGHBOURS = 10_000  # names that are compared with one that is missing
TRACEBACK = "\nOriginal Traceback (most recent call last):\n"  # in what torch's ExceptionWrapper makes


class ShardprepError(Exception):
    """Base of all errors of this package, with the place and what to do.

    ``message`` is the text; ``path``, ``shard`` and ``key`` (of the record) are None if they do not apply.
    All four may hold any text from a file, of any length. The shown text (``str``, ``repr``, notes) is
    printable: one line of at most 1,000 characters (MOST_CHARACTERS) for each of the four. Errors are
    picklable, so a worker's error is raised in the parent with its own type. PyTorch makes the error of a
    DataLoader's worker anew, of the worker's traceback as its message: that keeps its lines.
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
        self.path = None if path is None else os.fsdecode(path)
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
    """An attempt to copy or pickle an object that owns a resource of the system; nothing was made."""


class DataError(ShardprepError):
    """The data is damaged or incomplete."""

    exit_code = 1


class SourceDamaged(DataError):
    """An archive or a file of the source is damaged, or has content that is not allowed."""


class SourceIncomplete(DataError):
    """The source has fewer or more images than it should."""


class LabelConflict(DataError):
    """Two sources of labels (ground truth, folder names, known labels) disagree."""


class BadImage(DataError):
    """Bytes that are not an intact image of a supported kind."""


class BadTarget(DataError):
    """A mask or boxes that a transform cannot use: of another kind or size than the image asks for."""


class ManifestDamaged(DataError):
    """manifest.json is missing, not canonical, or does not match its own root."""


class ShardDamaged(DataError):
    """A shard's container cannot be read, or has content that is not allowed."""


class CorruptRecord(DataError):
    """A record's bytes do not match its checksum."""


class OperationError(ShardprepError):
    """The system does not allow the operation: I/O, permissions, space."""

    exit_code = 3


class DatasetNotFound(OperationError, FileNotFoundError):
    """There is no folder where a dataset should be."""

    errno: Any = error_numbers.ENOENT
    filename: Any = property(lambda self: self.path)
    strerror: Any = property(lambda self: self.message)

    @classmethod
    def at(cls, folder: Path) -> DatasetNotFound:
        """Return the error for a folder, with the path that is there and was probably meant."""
        if folder.exists():
            return cls("is not a folder; a dataset is the folder that prep convert made", path=folder)
        close = _close_path(folder)
        hint = f"; did you mean {os.fspath(close)!r}?" if close else _beside(folder)
        return cls(f"there is no such folder{hint}", path=folder)


def _close_path(path: Path) -> Path | None:
    """Return the folder with the names of the path, or where one is missing a name close to it."""
    found = Path(path.anchor)
    for name in path.parts[bool(path.anchor) :]:
        if not (found / name).is_dir():
            try:
                with os.scandir(found) as entries:
                    names = [each.name for each in islice(entries, MOST_NEIGHBOURS) if each.is_dir()]
            except OSError:
                return None
            if not (close := get_close_matches(name, names, 1)):
                return None
            name = close[0]
        found /= name
    return found


def _beside(folder: Path) -> str:
    """Say which folders are beside one that is missing, if they are few."""
    try:
        with os.scandir(folder.parent) as entries:
            names = sorted(
                e.name for e in islice(entries, MOST_NEIGHBOURS) if e.is_dir() and e.name[0] != "."
            )
    except OSError:
        return ""
    return f"; its parent folder has {', '.join(names)}" if 0 < len(names) <= MOST_NAMED else ""


class MissingExtra(OperationError, ImportError):
    """A package is not installed that an extra of this package brings."""

    @classmethod
    def of(
        cls, what: str, package: str, extra: str, *, path: str | os.PathLike[str] | None = None
    ) -> MissingExtra:
        """Return the error for what needs a package, with the command that installs it."""
        advice = f"pip install 'shardprep[{extra}]'"
        return cls(f"{what} needs {package}, which is not installed: {advice}", path=path)


class OutputBusy(OperationError):
    """Another process works on the same output."""


class NoSpace(OperationError):
    """The disk is full, or would get full."""


class WorkerDied(OperationError):
    """A worker process ended before its work was done; ``key`` is the record it was at."""


class UnknownVersion(ShardprepError):
    """A format version that this release does not know."""

    exit_code = 4
