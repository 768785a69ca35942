"""The reader of records in several files, each by the offset at which it begins."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.source import ByteReader
from shardprep.formats.sources.listing.tree_files import wrapped
from shardprep.formats.system.regular_file import ArchiveFile

MAX_OPEN = 64  # files; a stored order goes to and fro between them


@dataclass
class FilesReader(ByteReader):
    """Reader of the records in files below ``top``, which must be unchanged since they were listed."""

    top: Path
    schema: Schema = field(default_factory=Schema)
    _files: OrderedDict[bytes, ArchiveFile] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __enter__(self) -> FilesReader:
        self._files = OrderedDict()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        files, self._files = self._files, None
        with ExitStack() as every:  # all are closed, also if one of them has changed
            for file in (files or {}).values():
                every.callback(file.__exit__, kind)

    @property
    def is_open(self) -> bool:
        return self._files is not None

    @abstractmethod
    def read(self, entry: np.void) -> bytes: ...

    def where(self, entry: np.void) -> str:
        return f"{self.path_of(entry)}, byte {entry['offset']}"

    def path_of(self, entry: np.void) -> Path:
        """Return the path of the file that the entry lies in."""
        return self.top / str(entry["path"], "utf-8")

    def file_of(self, entry: np.void) -> ArchiveFile:
        """Return the open file that the entry lies in. Raises SourceDamaged if it has changed, OSError."""
        if self._files is None:
            raise ValueError("the reader is closed")
        path = entry["path"].item()
        if path not in self._files:
            self._files[path] = self._opened(entry)
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)[1].__exit__(None)
        self._files.move_to_end(path)
        return self._files[path]

    def _opened(self, entry: np.void) -> ArchiveFile:
        try:
            file = ArchiveFile(self.path_of(entry)).__enter__()
        except FileNotFoundError:
            raise self.changed(entry) from None
        if wrapped(file.identity.mtime_ns) != entry["mtime_ns"]:
            file.__exit__(SourceDamaged)
            raise self.changed(entry)
        file.expect_random_reads()
        return file

    def changed(self, entry: np.void) -> SourceDamaged:
        """Return the error for a record that is not the one that was listed."""
        return SourceDamaged(
            "changed while it was read; let no other program write to it, and start again",
            path=self.where(entry),
            key=entry["key"].decode(),
        )
