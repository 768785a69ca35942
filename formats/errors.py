"""Everything that can go wrong, as one tree.

A class that is defined beside its only use is followed by its file. The exit code is that of ``prep``.

::

    ShardprepError
    ├── UsageError  exit 2: the request has no meaning
    │   ├── PlanMismatch  OUTPUT holds the work of another plan
    │   ├── NotCopyable  an object that owns a process, thread, file or socket was to be copied
    │   └── Refused (loaders/remote/sender_link.py)  the receiver trains on something else
    ├── DataError  exit 1: the data is damaged or incomplete
    │   ├── SourceDamaged  an archive or a file of the source is broken
    │   ├── SourceIncomplete  the source has another number of images than it should
    │   ├── LabelConflict  two authorities disagree about a label
    │   ├── BadImage  bytes that are not an intact image
    │   ├── BadTarget  a mask or boxes that do not fit their image
    │   ├── ManifestDamaged  manifest.json, or a table that it lists, is not what was published
    │   ├── ShardDamaged  a shard's container cannot be read
    │   │   └── ChildDied (formats/processes/child_process.py)  reading or decoding crashed a process
    │   ├── CorruptRecord  a record's bytes do not match its checksum
    │   ├── BadValue (formats/columns/codec.py)  a value that its column cannot hold
    │   ├── RemoteMissing (formats/system/storage/failures.py)  a file is not in the bucket or on the server
    │   ├── RemoteDamaged (formats/dataset/remote/fetching/transfer.py)  a server sends another file
    │   ├── BadItem (formats/conversion/writing/item_coder.py)  an item to save that does not fit the others
    │   └── FrameDamaged (loaders/frames/bounds.py)  a message that is not a frame
    ├── OperationError  exit 3: a check or an operation could not be done: I/O, permission, space
    │   ├── OutputBusy  another process works on the same output
    │   ├── ExecutorFailed (formats/processes/executors/executor_call.py)  an executor lost a job
    │   ├── OtherMachine (formats/processes/executors/other_machine.py)  a worker's machine differs
    │   ├── NoSpace  the disk is, or would get, full
    │   │   └── CacheTooSmall (formats/dataset/remote/caching/room.py)  its limit is too small
    │   ├── WorkerDied  a worker process ended before its work did
    │   ├── ChildLost (formats/processes/child_process.py)  a process was killed, or took too long
    │   ├── WorkFailed (loaders/engine/protocol/worker_errors.py)  an exception that cannot be pickled
    │   ├── RemoteFailed (formats/system/storage/failures.py)  a bucket or a server does not answer
    │   │   ├── RemoteDenied (formats/system/storage/failures.py)  it gives no access
    │   │   ├── AnswerBroken (formats/system/storage/failures.py)  its answer broke off
    │   │   └── RangeRefused (formats/system/storage/failures.py)  it sends no parts of files
    │   ├── SenderFailed (loaders/frames/receiver.py)  a sender reported an error, or is gone
    │   ├── ReceiverGone (loaders/frames/sender.py)  the receiver is closed or gone
    │   ├── NotAdmitted (loaders/remote/auth/sender_auth.py)  the receiver does not know the sender's key
    │   ├── WrongReceiver (loaders/remote/auth/sender_auth.py)  the receiver does not have the expected key
    │   └── ConnectionDamaged (loaders/remote/auth/sender_auth.py)  a connection carried what is not ZeroMQ's
    └── UnknownVersion  exit 4: written by a release that this one does not know
"""

from __future__ import annotations

import os
from typing import ClassVar

from .printable import printable, printable_lines


class ShardprepError(Exception):
    """Base of all errors of this package, with the place and what to do.

    ``message`` is the text; ``path``, ``shard`` and ``key`` (of the record) are None if they do not apply.
    All four may hold any text from a file, of any length. The shown text (``str``, ``repr``, notes) is
    printable: one line of at most 1,000 characters (MOST_CHARACTERS) for each of the four. Errors are
    picklable, so a worker's error is raised in the parent with its own type.
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
    """An archive or a file of the source is damaged, or holds what it must not."""


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
    """A shard's container cannot be read, or holds what it must not."""


class CorruptRecord(DataError):
    """A record's bytes do not match its checksum."""


class OperationError(ShardprepError):
    """The system does not allow the operation: I/O, permissions, space."""

    exit_code = 3


class OutputBusy(OperationError):
    """Another process works on the same output."""


class NoSpace(OperationError):
    """The disk is full, or would get full."""


class WorkerDied(OperationError):
    """A worker process ended before its work was done; ``key`` is the record it was at."""


class UnknownVersion(ShardprepError):
    """A format version that this release does not know."""

    exit_code = 4
