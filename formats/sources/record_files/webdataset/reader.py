"""The reader of samples: their headers are read again with their bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.schema import Field
from shardprep.formats.sources.record_files.column_fields import column_name, encoded
from shardprep.formats.sources.record_files.files_reader import FilesReader
from shardprep.formats.sources.tar.walk import Member
from shardprep.formats.system.regular_file import ArchiveFile

from .samples import ShardSample, samples


@dataclass
class SampleReader(FilesReader):
    """Reader of the samples in tars. An entry's offset is that of its sample's first header."""

    _last: tuple[bytes, int, ShardSample] | None = field(default=None, init=False, repr=False, compare=False)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._last = None
        super().__exit__(kind, *rest)

    def read(self, entry: np.void) -> bytes:
        archive, sample = self._sample(entry)
        return b"" if sample.image is None else self._bytes(archive, sample.parts[sample.image], entry)

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        archive, sample = self._sample(entry)
        members = {column_name(extension): member for extension, member in sample.parts.items()}
        return tuple(self._value(each, archive, members.get(each.name), entry) for each in self.schema)

    def _value(self, column: Field, archive: ArchiveFile, member: Member | None, entry: np.void) -> bytes:
        if member is None:
            raise self.changed(entry)
        place, key = f"{archive.path}, byte {member.offset}", entry["key"].decode()
        try:
            value = column.codec.decode(self._bytes(archive, member, entry))
        except BadValue as error:
            raise BadValue(f"the column {column.name}: {error.message}", path=place, key=key) from error
        return encoded(column, value, path=place, key=key)

    def _sample(self, entry: np.void) -> tuple[ArchiveFile, ShardSample]:
        archive = self.file_of(entry)
        path, offset = entry["path"].item(), int(entry["offset"])
        if self._last is None or self._last[:2] != (path, offset):
            sample = next(samples(archive, offset), None)
            if sample is None or sample.length != entry["length"]:
                raise self.changed(entry)
            self._last = (path, offset, sample)
        return archive, self._last[2]

    def _bytes(self, archive: ArchiveFile, member: Member, entry: np.void) -> bytes:
        data = archive.read_at(member.size, member.offset)
        if len(data) < member.size:
            raise self.changed(entry)
        return data
