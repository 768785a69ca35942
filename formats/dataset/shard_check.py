"""The check of every record of one shard: checksum, index, count and, on request, decoding."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardprep.formats.containers.archive import ARCHIVE_NAME, Region, changed_in, hash_region
from shardprep.formats.containers.container import ShardReader, Stored
from shardprep.formats.containers.registry import IN_PLACE, container
from shardprep.formats.containers.table import Rows
from shardprep.formats.errors import BadImage, CorruptRecord, OperationError, ShardDamaged
from shardprep.formats.images.crop_ready.grid_table import marked
from shardprep.formats.images.decode_check import check_decodes
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.image_info import ImageFlag
from shardprep.formats.records.record import content_digest
from shardprep.formats.system.atomic_write import hash_descriptor
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.regular_file import OPEN_FLAGS

from .index import index_row

NO_MEMORY = "there is not enough memory for this; work with fewer workers"


@dataclass(frozen=True, eq=False)
class ShardCheck:
    """What to check of a shard; ``rows`` are its rows of the index, None if that is damaged. Picklable.

    ``region`` is where the images are in the archive, None where the shard has them.
    """

    path: Path
    number: int
    container: str
    records: int
    sha256: str
    rows: Rows | None
    decode: bool
    region: Region | None = None

    @property
    def archive(self) -> Path:
        """The archive that the images are in, where there is a region of it to check."""
        return self.path.with_name(ARCHIVE_NAME)


@dataclass
class Checked:
    """The findings: ``problems`` as (key or None, message), ``notes`` of the decoder, and content digests.

    ``unread`` are the system's errors at which the check ended. ``changed`` says that the region of the
    archive is not what was indexed; empty if it is.
    """

    problems: list[tuple[str | None, str]] = field(default_factory=list)
    notes: list[tuple[str | None, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    digests: bytes = b""
    changed: str = ""

    def add(self, other: Checked) -> None:
        """Add the findings of another check of the same shard."""
        self.problems += other.problems
        self.notes += other.notes
        self.unread += other.unread


def check_shard(check: ShardCheck) -> Checked:
    """Hash the file, then read it through the same descriptor, so that both read the same file.

    A damaged container may crash the library that opens it: call this in a separate process.
    """
    descriptor = os.open(check.path, OPEN_FLAGS | os.O_NOFOLLOW)
    found = Checked()
    try:
        if hash_descriptor(descriptor) != check.sha256:
            found.problems.append((None, "its SHA-256 is not the manifest's"))
        if check.region and hash_region(check.archive, check.region) != check.region.sha256:
            found.changed = changed_in(check.archive, check.region)
        same = Path(f"/proc/self/fd/{descriptor}")
        by_number = same.exists() and check.container != IN_PLACE  # which is found by the shard's name
        with container(check.container).read(same if by_number else check.path) as reader:
            _check_records(reader, check, found)
    except ShardDamaged as error:
        found.problems.append((None, error.message))
    except OperationError as error:
        found.unread.append(error.message)
    except OSError as error:  # earlier findings stay
        found.unread.append(error.strerror or str(error))
    except MemoryError:
        found.unread.append(NO_MEMORY)
    finally:
        os.close(descriptor)
    return found


def check_decoding(check: ShardCheck, ordinals: range) -> Checked:
    """Decode the shard's intact images, and check nothing else. Call it in a separate process."""
    found = Checked()
    with container(check.container).read(check.path) as reader:
        for ordinal in ordinals:
            with suppress(CorruptRecord, ShardDamaged):
                _check_decoding(reader.checked(ordinal), found)
    return found


def key_of_record(check: ShardCheck, ordinal: int) -> str:
    """Return the key of a record. Raises ShardDamaged. Call it in a separate process."""
    with container(check.container).read(check.path) as reader:
        return reader.stored(ordinal).key.decode("utf-8", "replace")


def _check_records(reader: ShardReader, check: ShardCheck, found: Checked) -> None:
    if len(reader) != check.records:
        found.problems.append((None, f"has {len(reader)} records, not {check.records}"))
    digests = []
    for ordinal in range(_records_to_check(reader, check)):
        stored = _check_record(reader, ordinal, check.number, check.rows, found)
        if stored is not None:
            digests.append(content_digest(stored.key, stored.label, stored.image))
            if check.decode:
                _check_decoding(stored, found)
    found.digests = b"".join(digests)


def _records_to_check(reader: ShardReader, check: ShardCheck) -> int:
    """Return the manifest's number if the index names each record; else no more than the shard has."""
    return check.records if check.rows is not None else min(check.records, len(reader))


def _check_record(
    reader: ShardReader, ordinal: int, shard: int, rows: Rows | None, found: Checked
) -> Stored | None:
    key = None if rows is None else rows["key"][ordinal].decode("utf-8", "replace")
    try:
        stored = reader.checked(ordinal)
    except (CorruptRecord, ShardDamaged) as error:
        found.problems.append((key or error.key, error.message))
        return None
    if rows is not None:
        _compare(stored, rows[ordinal], shard, ordinal, found)
    return stored


def _compare(stored: Stored, row: np.void, shard: int, ordinal: int, found: Checked) -> None:
    key = row["key"].decode("utf-8", "replace")
    try:
        info = marked(stored.image, read_image_header(stored.image))
        expected = index_row(stored, info, shard, ordinal)
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


def _check_decoding(stored: Stored, found: Checked) -> None:
    key = stored.key.decode("utf-8", "replace")
    with _Stderr() as captured:
        try:
            check_decodes(stored.image)
        except BadImage as error:
            found.problems.append((key, error.message))
            return
    if captured.text:
        found.notes.append((key, f"the decoder says: {captured.text}"))


class _Stderr(Owned):
    """Captures what a C library writes to descriptor 2, in a process that does nothing else."""

    text = ""

    def __enter__(self) -> _Stderr:
        self._file = tempfile.TemporaryFile()
        self._cached = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._cached, 2)
        os.close(self._cached)
        with self._file as file:
            file.seek(0)
            lines = file.read(4096).decode("utf-8", "replace").split("\n")
        self.text = lines[0].strip()
