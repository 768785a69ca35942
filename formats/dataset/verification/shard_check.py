"""The check of every record of one shard: checksum, index, count and, on request, decoding."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardprep.formats.containers.archive import ARCHIVE_NAME, Region, changed_in, hash_region
from shardprep.formats.containers.container import ShardReader, Stored
from shardprep.formats.containers.registry import IN_PLACE, container
from shardprep.formats.containers.table import Rows
from shardprep.formats.dataset.index import index_row
from shardprep.formats.errors import BadImage, CorruptRecord, ShardDamaged
from shardprep.formats.images.crop_ready.grid_table import marked
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.image_info import NO_IMAGE, ImageFlag, ImageInfo
from shardprep.formats.records.record import content_digest

from .check import Check, Checked, hashed_file
from .decoding import check_decoding


@dataclass(frozen=True, eq=False)
class ShardCheck(Check):
    """What to check of a shard; ``rows`` are its rows of the index, None if that is damaged.

    ``region`` is where the images are in the archive, None where the shard has them.
    """

    number: int
    container: str
    rows: Rows | None
    has_images: bool = True
    region: Region | None = None

    @property
    def archive(self) -> Path:
        """The archive that the images are in, where there is a region of it to check."""
        return self.path.with_name(ARCHIVE_NAME)

    def found(self) -> Checked:
        """Hash the file, then read it through the same descriptor, so that both read the same file."""
        found = Checked()
        with hashed_file(self, found) as path:
            if self.region and hash_region(self.archive, self.region) != self.region.sha256:
                found.changed = changed_in(self.archive, self.region)
            named = self.path if self.container == IN_PLACE else path  # in place is found by the shard's name
            with container(self.container).read(named) as reader:
                self._check_records(reader, found)
        return found

    def decoded(self, ordinals: range) -> Checked:
        found = Checked()
        with container(self.container).read(self.path) as reader:
            for ordinal in ordinals:
                with suppress(CorruptRecord, ShardDamaged):
                    stored = reader.checked(ordinal)
                    check_decoding(stored.key, stored.image, found)
        return found

    def key_of(self, ordinal: int) -> str:
        with container(self.container).read(self.path) as reader:
            return reader.stored(ordinal).key.decode("utf-8", "replace")

    def _check_records(self, reader: ShardReader, found: Checked) -> None:
        if len(reader) != self.records:
            found.problems.append((None, f"has {len(reader)} records, not {self.records}"))
        digests = []
        for ordinal in range(self._records_to_check(reader)):
            stored = self._check_record(reader, ordinal, found)
            if stored is not None:
                digests.append(content_digest(stored.key, stored.label, stored.image))
                if self.decode and self.has_images:
                    check_decoding(stored.key, stored.image, found)
        found.digests = b"".join(digests)

    def _records_to_check(self, reader: ShardReader) -> int:
        """Return the manifest's number if the index names each record; else no more than the shard has."""
        return self.records if self.rows is not None else min(self.records, len(reader))

    def _check_record(self, reader: ShardReader, ordinal: int, found: Checked) -> Stored | None:
        key = None if self.rows is None else self.rows["key"][ordinal].decode("utf-8", "replace")
        try:
            stored = reader.checked(ordinal)
        except (CorruptRecord, ShardDamaged) as error:
            found.problems.append((key or error.key, error.message))
            return None
        if self.rows is not None:
            self._compare(stored, self.rows[ordinal], ordinal, found)
        return stored

    def _compare(self, stored: Stored, row: np.void, ordinal: int, found: Checked) -> None:
        key = row["key"].decode("utf-8", "replace")
        try:
            info = self._info(stored.image)
            expected = index_row(stored, info, self.number, ordinal)
        except BadImage as error:
            found.problems.append((key, error.message))
            return
        if row["flags"] & ~info.flags & ImageFlag.CROP_READY:
            found.problems.append(
                (key, f"record {ordinal} has a table of segments that is not that of its bytes")
            )
        elif row.item() != expected:
            there = stored.key.decode("utf-8", "replace")
            found.problems.append((key, f"record {ordinal} differs from the index: its key is {there}"))

    def _info(self, image: bytes) -> ImageInfo:
        """Return the properties of a record's image. Raises BadImage."""
        if not self.has_images:
            return NO_IMAGE
        return marked(image, read_image_header(image))
