"""A file on its way into a cache, which has its room on the disk before its first byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.dataset.remote.fetching.part_file import PartFile
from shardprep.formats.system.descriptor import Descriptor, LockDescriptor
from shardprep.formats.system.regular_file import naming


class ReservedPart(PartFile):
    """A locked part. It is made, published and removed in a turn of the cache.

    Raises FileExistsError for one that is on its way already.
    """

    _opened: ClassVar[type[Descriptor]] = LockDescriptor
    _descriptor: LockDescriptor

    def __init__(self, path: Path, entry: FileEntry) -> None:
        super().__init__(path)
        self.entry = entry
        if not self._descriptor.lock(wait=False):
            self.close()
            raise FileExistsError(path)

    def reserve(self) -> None:
        """Take the room. Raises OSError for a full disk."""
        with naming(self.path):
            if self.entry.size and hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(self._descriptor.fileno(), 0, self.entry.size)
            os.ftruncate(self._descriptor.fileno(), self.entry.size)
        self.room = self.entry.size

    def flush(self) -> None:
        """Flush the file."""
        with naming(self.path):
            os.fsync(self._descriptor.fileno())

    def remove(self) -> None:
        """Give up the file and its room."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.close()

    @property
    def lock(self) -> LockDescriptor:
        """The lock on the file, also after it was published."""
        return self._descriptor

    def share(self) -> None:
        """Share the lock on the file that was published with its readers."""
        self._descriptor.lock(shared=True)
