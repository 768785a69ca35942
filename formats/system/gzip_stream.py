"""A gzip file's content, inflated forwards and up to a limit."""

from __future__ import annotations

import gzip
import os
import zlib
from contextlib import AbstractContextManager
from pathlib import Path

from shardprep.formats.errors import SourceDamaged

from .owned import Owned
from .regular_file import naming, open_regular

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
        try:
            with naming(self.path):
                data = self._file.read(length)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise SourceDamaged(f"cannot be inflated ({error}); download it again", path=self.path) from error
        self._at += len(data)
        if self._at > self._limit:
            raise SourceDamaged(
                f"inflates to more than {self._limit} bytes; it is not the official file", path=self.path
            )
        return data
