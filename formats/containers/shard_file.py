"""A shard's file, open to be read by position: a later change of the file gives an error, never a signal."""

from __future__ import annotations

import os
from pathlib import Path

from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.positional import read_at, read_into
from shardprep.formats.system.regular_file import OPEN_FLAGS, naming


class ShardFile(Owned):
    """A file that any number of threads read by position. ``size`` is its size when it was opened.

    Raises OSError with the file's name, and ValueError once it is closed.
    """

    instead = "open the file again by its path"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = Descriptor(os.open(path, OPEN_FLAGS))
        with naming(path):
            self.size = os.fstat(self._descriptor.fileno()).st_size

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more, and holds its space only because it is open."""
        return os.fstat(self._open_number()).st_nlink == 0

    def read_at(self, length: int, offset: int) -> bytes:
        """Return ``length`` bytes from ``offset``, fewer only if the file ends before."""
        try:
            return read_at(self._open_number(), length, offset)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset``; return the number of bytes that the file had."""
        try:
            return read_into(self._open_number(), memory, offset)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise

    def _open_number(self) -> int:
        if (number := self._descriptor.fileno()) < 0:
            raise ValueError(f"{self.path} is closed")
        return number

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._descriptor.close()
