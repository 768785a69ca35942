"""The check of one file of a dataset in a separate process, and what it finds."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from shardprep.formats.errors import OperationError, ShardDamaged
from shardprep.formats.system.atomic_write import hash_descriptor
from shardprep.formats.system.regular_file import OPEN_FLAGS

NO_MEMORY = "there is not enough memory for this; work with fewer workers"


@dataclass
class Checked:
    """The findings: ``problems`` as (key or None, message), ``notes`` of the decoder, and content digests.

    ``unread`` are the system's errors at which the check ended. ``changed`` says that the region of the
    archive is not what was indexed; empty if it is.
    """

    problems: list[tuple[str | None, str]] = field(default_factory=list)
    notes: list[tuple[str | None, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    digests: bytes = b""
    changed: str = ""

    @property
    def found_nothing(self) -> bool:
        """Whether all was read, and nothing is wrong or remarkable."""
        return not (self.problems or self.notes or self.unread or self.changed)

    def add(self, other: Checked) -> None:
        """Add the findings of another check of the same file."""
        self.problems += other.problems
        self.notes += other.notes
        self.unread += other.unread


@dataclass(frozen=True, eq=False)
class Check(ABC):
    """What to check of a file at ``path``, of so many ``records`` and this ``sha256``. Picklable.

    A damaged container may crash the library that opens it, and a damaged image the decoder: the methods are
    called in separate processes. With ``decode`` the values are decoded, too.
    """

    path: Path
    records: int
    sha256: str
    decode: bool

    @abstractmethod
    def found(self) -> Checked:
        """Return the findings of the whole check."""

    @abstractmethod
    def decoded(self, ordinals: range) -> Checked:
        """Decode the intact records at these ordinals, and check nothing else."""

    @abstractmethod
    def key_of(self, ordinal: int) -> str:
        """Return the key of a record. Raises ShardDamaged."""

    def without_decoding(self) -> Self:
        """Return the check of everything else."""
        return replace(self, decode=False)


@contextmanager
def hashed_file(check: Check, found: Checked) -> Iterator[Path]:
    """Hash the file, and yield a path to the same file, whatever its name becomes.

    An error in the context ends it, and is added to ``found``; earlier findings stay.
    """
    descriptor = os.open(check.path, OPEN_FLAGS | os.O_NOFOLLOW)
    try:
        if hash_descriptor(descriptor) != check.sha256:
            found.problems.append((None, "its SHA-256 is not the manifest's"))
        same = Path(f"/proc/self/fd/{descriptor}")
        yield same if same.exists() else check.path
    except ShardDamaged as error:
        found.problems.append((None, error.message))
    except OperationError as error:
        found.unread.append(error.message)
    except OSError as error:
        found.unread.append(error.strerror or str(error))
    except MemoryError:
        found.unread.append(NO_MEMORY)
    finally:
        os.close(descriptor)
