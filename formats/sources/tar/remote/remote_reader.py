"""The reader of images in an archive in object storage, each by its offset."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.source import ByteReader, Entries

from .remote_archive import RemoteArchive
from .remote_file import RemoteFile


@dataclass
class RemoteTarReader(ByteReader):
    """Reader of entries of one uncompressed archive, which must be unchanged since it was listed."""

    file: RemoteFile
    _archive: RemoteArchive | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> RemoteTarReader:
        self._archive = RemoteArchive(self.file).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._archive is not None:
            archive, self._archive = self._archive, None
            archive.__exit__(kind)

    @property
    def is_open(self) -> bool:
        return self._archive is not None

    def expect(self, entries: Entries) -> None:
        self._opened().expect(zip(entries["length"].tolist(), entries["offset"].tolist(), strict=True))

    def read(self, entry: np.void) -> bytes:
        length = int(entry["length"])
        data = self._opened().read_at(length, int(entry["offset"]))
        if len(data) < length:
            raise SourceDamaged("ends before the image does; copy it again", path=self.where(entry))
        return data

    def _opened(self) -> RemoteArchive:
        if self._archive is None:
            raise ValueError("the reader is closed")
        return self._archive

    def where(self, entry: np.void) -> str:
        return f"{self.file.url}, byte {entry['offset']}"
