"""Every record of one shard, checked: checksum, index, count and, on request, decoding."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .build import index_row
from .decode_check import check_decodes
from .errors import BadImage, CorruptRecord, ShardDamaged
from .image_header import read_image_header
from .index import Rows, map_index
from .publish import hash_descriptor
from .record import content_digest
from .shard import ShardReader, Stored, container


@dataclass(frozen=True)
class ShardCheck:
    """What to check of a shard; ``first`` is the index row of its first record. Picklable."""

    path: Path
    number: int
    container: str
    records: int
    sha256: str
    index: Path | None
    first: int
    decode: bool


@dataclass
class Checked:
    """What was found: problems as (key or None, message), decoder's mutterings, content digests."""

    problems: list[tuple[str | None, str]] = field(default_factory=list)
    notes: list[tuple[str | None, str]] = field(default_factory=list)
    digests: bytes = b""


def check_shard(check: ShardCheck) -> Checked:
    """Hash the file, then read it through the same descriptor, so that both see the same file.

    Damaged containers may crash the library that opens them: run it isolated.
    """
    descriptor = os.open(check.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = Checked()
    try:
        if hash_descriptor(descriptor) != check.sha256:
            found.problems.append((None, "its SHA-256 is not the manifest's"))
        same = Path(f"/proc/self/fd/{descriptor}")
        with container(check.container).read(same if same.exists() else check.path) as reader:
            _check_records(reader, check, found)
    except ShardDamaged as error:
        found.problems.append((None, error.message))
    finally:
        os.close(descriptor)
    return found


def _check_records(reader: ShardReader, check: ShardCheck, found: Checked) -> None:
    if len(reader) != check.records:
        found.problems.append((None, f"has {len(reader)} records, not {check.records}"))
    rows = None if check.index is None else _rows_of(check, check.index)
    digests = []
    for ordinal in range(check.records):
        stored = _check_record(reader, ordinal, check.number, rows, found)
        if stored is not None:
            digests.append(content_digest(stored.key, stored.label, stored.image))
            if check.decode:
                _check_decoding(stored, found)
    found.digests = b"".join(digests)


def _rows_of(check: ShardCheck, index: Path) -> Rows:
    rows = map_index(index)[check.first : check.first + check.records]
    if len(rows) != check.records:
        raise ShardDamaged(f"the index has {len(rows)} rows for its {check.records} records")
    return rows


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
        expected = index_row(stored, read_image_header(stored.image), shard, ordinal)
    except BadImage as error:
        found.problems.append((key, error.message))
        return
    if row.item() != expected:
        there = stored.key.decode("utf-8", "replace")
        found.problems.append((key, f"record {ordinal} is not as the index says: {there} lies there"))


def _check_decoding(stored: Stored, found: Checked) -> None:
    key = stored.key.decode("utf-8", "replace")
    with _Stderr() as muttered:
        try:
            check_decodes(stored.image)
        except BadImage as error:
            found.problems.append((key, error.message))
            return
    if muttered.text:
        found.notes.append((key, f"the decoder says: {muttered.text}"))


class _Stderr:
    """Takes what a C library writes to descriptor 2; the process must be ours alone."""

    text = ""

    def __enter__(self) -> _Stderr:
        self._file = tempfile.TemporaryFile()
        self._kept = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
        with self._file as file:
            file.seek(0)
            lines = file.read(4096).decode("utf-8", "replace").split("\n")
        self.text = lines[0].strip()
