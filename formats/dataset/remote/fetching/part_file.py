"""Files that are hashed from their beginning, and one that grows at its end while it is downloaded."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import ClassVar

from shardprep.formats.system.atomic_write import publish
from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.positional import read_at, write_at
from shardprep.formats.system.regular_file import OPEN_FLAGS, naming

SLICE_BYTES = 4 << 20


class HashedFile(Owned):
    """A file that is hashed slice by slice. ``size`` is the number of bytes that are hashed.

    Not thread-safe. Raises OSError with the file's name.
    """

    _opened: ClassVar[type[Descriptor]] = Descriptor

    def __init__(self, path: Path, flags: int = OPEN_FLAGS) -> None:
        self.path = path
        self.size, self._digest = 0, hashlib.sha256()
        self._descriptor = self._opened(os.open(path, flags, 0o644))

    @property
    def size_on_disk(self) -> int:
        """The file's size in bytes; -1 if it is not a regular file."""
        status = os.fstat(self._descriptor.fileno())
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    @property
    def sha256(self) -> str:
        """The digest of the bytes that are hashed."""
        return f"sha256:{self._digest.hexdigest()}"

    def hash_next(self) -> int:
        """Hash the next slice of the file; return its bytes, 0 at the end."""
        with naming(self.path):
            data = read_at(self._descriptor.fileno(), SLICE_BYTES, self.size)
        self._digest.update(data)
        self.size += len(data)
        return len(data)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._descriptor.close()


class PartFile(HashedFile):
    """The first bytes of a file, under another name until it is complete; a killed run leaves them.

    ``room`` bytes of the file stay its own, whatever is dropped.
    """

    room = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC)

    def append(self, data: bytes) -> None:
        """Write and hash bytes at the end of what is hashed."""
        with naming(self.path):
            write_at(self._descriptor.fileno(), data, self.size)
        self._digest.update(data)
        self.size += len(data)

    def clear(self) -> None:
        """Drop all bytes."""
        with naming(self.path):
            os.ftruncate(self._descriptor.fileno(), self.room)
        self.size, self._digest = 0, hashlib.sha256()

    def publish(self, final: Path) -> None:
        """Flush the file and give it its name, in place of any other file of that name."""
        with naming(self.path):
            os.fsync(self._descriptor.fileno())
        publish(self.path, final)
