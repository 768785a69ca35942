"""Everything that can go wrong, as one tree.

::

    ShardprepError
    ├── UsageError              exit 2  what was asked for cannot be meant
    │   └── PlanMismatch                OUTPUT holds the work of another plan
    ├── DataError               exit 1  the data is damaged or incomplete
    │   ├── SourceDamaged               an archive or a file of the source is broken
    │   ├── SourceIncomplete            the source has another number of images than it should
    │   ├── LabelConflict               two authorities disagree about a label
    │   ├── BadImage                    bytes that are not an intact image
    │   ├── ManifestDamaged             manifest.json is not what was published
    │   ├── ShardDamaged                a shard's container cannot be read
    │   └── CorruptRecord               a record's bytes do not match its checksum
    ├── OperationError          exit 3  could not check or do: I/O, permission, space
    │   ├── OutputBusy                  another process works on the same output
    │   ├── NoSpace                     the disk is, or would get, full
    │   └── WorkerDied                  a worker process ended before its work did
    └── UnknownVersion          exit 4  written by a release this one does not know
"""

from __future__ import annotations

import os
from typing import ClassVar


class ShardprepError(Exception):
    """Base of all errors raised here; carries where, and says what to do.

    ``path``, ``shard`` and ``key`` (of the record) are None where they do not apply.
    Errors are picklable, so that they travel from a worker as themselves.
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
        self.path = None if path is None else os.fspath(path)
        self.shard = shard
        self.key = key

    def __str__(self) -> str:
        places = dict.fromkeys(p for p in (self.path, self.shard, self.key) if p)
        return ": ".join([*places, self.message])


class UsageError(ShardprepError):
    """What was asked for cannot be meant: wrong options, unrecognised source."""

    exit_code = 2


class PlanMismatch(UsageError):
    """The output holds the work of another plan: other options, or a changed source."""


class DataError(ShardprepError):
    """The data is damaged or incomplete."""

    exit_code = 1


class SourceDamaged(DataError):
    """An archive or a file of the source is broken, or holds what it must not."""


class SourceIncomplete(DataError):
    """The source has another number of images than it should."""


class LabelConflict(DataError):
    """Two authorities (ground truth, folder names, sentinels) disagree about a label."""


class BadImage(DataError):
    """Bytes that are not an intact image of a supported kind."""


class ManifestDamaged(DataError):
    """manifest.json is missing, not canonical, or does not match its own root."""


class ShardDamaged(DataError):
    """A shard's container cannot be read, or holds what it must not."""


class CorruptRecord(DataError):
    """A record's bytes do not match its checksum."""


class OperationError(ShardprepError):
    """Could not check or do: I/O, permissions, space."""

    exit_code = 3


class OutputBusy(OperationError):
    """Another process works on the same output."""


class NoSpace(OperationError):
    """The disk is full, or would get full."""


class WorkerDied(OperationError):
    """A worker process ended before its work did; ``key`` is the record it was at."""


class UnknownVersion(ShardprepError):
    """A format version that this release does not know."""

    exit_code = 4
