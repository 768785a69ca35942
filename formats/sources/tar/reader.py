"""The reader of images in an archive, each by its offset."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.source import ByteReader, WholeArchive
from shardprep.formats.system.regular_file import ArchiveFile, Identity


@dataclass
class TarReader(ByteReader):
    """Reader of entries of one uncompressed archive, which must be unchanged since it was listed."""

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

    @property
    def archive(self) -> WholeArchive:
        return WholeArchive(self.path, self.identity.size)

    @property
    def is_open(self) -> bool:
        return self._file is not None

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
