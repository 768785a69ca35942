"""Images read out of an archive, each by its offset."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .archive_file import ArchiveFile, Identity
from .errors import SourceDamaged
from .source import ByteReader


@dataclass
class TarReader(ByteReader):
    """Reads entries out of one uncompressed archive, which must stay the one that was listed."""

    path: Path
    identity: Identity
    _file: ArchiveFile | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> TarReader:
        self._file = ArchiveFile(self.path, self.identity).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.__exit__(kind)

    def read(self, entry: np.void) -> bytes:
        if self._file is None:
            raise ValueError("the reader is closed")
        length = int(entry["length"])
        data = self._file.read_at(length, int(entry["offset"]))
        if len(data) < length:
            raise SourceDamaged("ends before the image does; copy it again", path=self.where(entry))
        return data

    def where(self, entry: np.void) -> str:
        return f"{self.path}, byte {entry['offset']}"
