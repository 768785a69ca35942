"""The source of an LMDB of tensorpack's LMDBSerializer: one split, with its images under running numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.listing.archive_md5 import archive_of
from shardprep.formats.sources.listing.entry_table import EntryTable
from shardprep.formats.sources.listing.source import Entries, Listing, Source, no_such_split
from shardprep.formats.sources.tar.reader import TarReader
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile, Identity

from .datapoint import (
    DIGITS,
    KEYS,
    Datapoint,
    Decode,
    check_key,
    decoder_of,
    is_key,
    is_pair,
    read_datapoint,
    read_keys,
)
from .items import ItemContents, ItemReader, begun_items, read_item
from .lmdb_file import LmdbRecords, is_lmdb
from .value import Value, from_latin1

LAYOUT = "tensorpack-lmdb"
_ADVICE = "write the LMDB again"
_FILE_IN_FOLDER = "data.mdb"


class TextReader(TarReader):
    """Reader of images with each byte stored as a character of UTF-8; an entry's length is the image's."""

    def read(self, entry: np.void) -> bytes:
        if self._file is None:
            raise ValueError("the reader is closed")
        length = int(entry["length"])
        try:
            return from_latin1(self._file.read_at(2 * length, int(entry["offset"])), length)
        except ValueError as error:
            raise SourceDamaged(
                f"holds no bytes there: {error}; copy it again", path=self.where(entry)
            ) from error


_KEYS = KEYS.decode()


def tensorpack_lmdb(path: Path, split: str) -> TensorpackLmdb | None:
    """Return the source of the LMDB at a path or in the folder there, taken for ``split``; None for no LMDB.

    Raises UsageError for the LMDB of another program, SourceDamaged, OSError.
    """
    file = path / _FILE_IN_FOLDER if path.is_dir() else path
    if not is_lmdb(file):
        return None
    with foreign_file(file, _ADVICE), ArchiveFile(file) as archive:
        first = next((key for key, _ in LmdbRecords(archive)), None)
    if first is None:
        raise UsageError("is an LMDB without records; give one that was written to its end", path=file)
    if first != KEYS and not is_key(first):
        raise UsageError(
            f"is an LMDB, but not of tensorpack's LMDBSerializer: its first key is {first[:32]!r}", path=file
        )
    return TensorpackLmdb(file, split)


@dataclass(frozen=True)
class TensorpackLmdb(Source):
    """An LMDB of tensorpack, with datapoints [image, label], or with any plain data, which become columns.

    The classes are named for the labels in the file, such as ``00042``, so each label stays the same. A
    record's key is the file's, with leading zeros if others have more digits.
    """

    path: Path
    split: str

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,)

    @property
    def description(self) -> str:
        return f"{LAYOUT}: {self.split}"

    def survey(self, split: str) -> Listing:
        if split != self.split:
            raise no_such_split(split, self.splits)
        with foreign_file(self.path, _ADVICE), ArchiveFile(self.path) as archive:
            archive.expect_random_reads()
            contents = _Contents(self.path)
            for key, value in LmdbRecords(archive):
                contents.add(key, value)
        entries = contents.entries()
        expected, shortfall = contents.completeness(entries)
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=entries,
            labels=LabelSpace.of(f"{label:05d}" for label in range(contents.classes)),
            reader=contents.reader(archive.identity),
            archives=(archive_of(self.path),),
            expected=expected,
            shortfall=shortfall,
            options=contents.items.form.to_json() if contents.items else {},
            schema=contents.schema,
            has_images=contents.items is None or "image" in contents.items.form.own,
        )


class _Contents:
    """The contents of a file as read so far. Raises SourceDamaged for what LMDBSerializer does not write."""

    def __init__(self, path: Path) -> None:
        self.as_text: bool | None = None
        self.classes = 0
        self.items: ItemContents | None = None
        self.schema = Schema()
        self._path = path
        self._table = EntryTable(path)
        self._decode: Decode | None = None
        self._is_begun = False
        self._listed: npt.NDArray[np.int64] | None = None

    def add(self, key: bytes, value: Value) -> None:
        with foreign_file(self._path, _ADVICE, key=key.decode(errors="backslashreplace")):
            self._decode = self._decode or decoder_of(value)
            if key == KEYS:
                self._listed = read_keys(value, self._decode)
            else:
                self._add_value(check_key(key), value, self._decode)

    def _add_value(self, key: str, value: Value, decode: Decode) -> None:
        """Add a datapoint: [image, label], or any plain data if the first one is that."""
        if self.items is None:
            try:
                self._add(key, value.offset, read_datapoint(value, decode))
            except ValueError:
                if self._is_begun or is_pair(value, decode):
                    raise
                self.items = begun_items(read_item(value, decode))
        if self.items is not None:
            label = self.items.label(read_item(value, decode))
            self._table.append(key, label, length=value.length, offset=value.offset)
            self.classes = max(self.classes, label + 1)
        self._is_begun = True

    def _add(self, key: str, offset: int, point: Datapoint) -> None:
        image, label = point
        if image.length:
            if self.as_text not in (None, image.latin1):
                raise ValueError("some images are stored as bytes and some as text")
            self.as_text = image.latin1
        self._table.append(key, label, length=image.length, offset=offset + image.start)
        self.classes = max(self.classes, label + 1)

    def entries(self) -> Entries:
        """Return all entries, and find the schema; leading zeros make keys sort as numbers."""
        if self.items is not None:
            with foreign_file(self._path, _ADVICE):
                self.schema = self.items.schema
        entries = self._table.finish()
        digits = entries["key"].dtype.itemsize
        if digits > DIGITS:
            entries["key"] = np.char.zfill(entries["key"], digits)
        return entries

    def reader(self, identity: Identity) -> TarReader:
        """Return the reader of the entries."""
        if self.items is not None:
            return ItemReader(self._path, identity, self._decode, self.items.form, self.schema)
        return (TextReader if self.as_text else TarReader)(self._path, identity)

    def completeness(self, entries: Entries) -> tuple[int, str]:
        """Return the number of records in the file's own list, and a phrase about what is missing."""
        if self._listed is None:
            return 0, f"there is no {_KEYS}, which is written last and says which records are all"
        there, listed = entries["key"].astype(np.int64), np.unique(self._listed)
        unlisted, missing = np.setdiff1d(there, listed), np.setdiff1d(listed, there)
        if len(listed) < len(self._listed):
            raise self._damaged(f"{_KEYS} lists a record twice")
        if len(unlisted):
            raise self._damaged(f"{_KEYS} does not list {len(unlisted)} of the records", _named(unlisted[0]))
        if not len(missing):
            return len(listed), ""
        return len(listed), f"{_KEYS} lists {len(missing)} that were lost, {_named(missing[0])} first"

    def _damaged(self, reason: str, key: str | None = None) -> SourceDamaged:
        return SourceDamaged(f"{reason}; {_ADVICE}", path=self._path, key=key)


def _named(number: np.int64) -> str:
    return f"{number:0{DIGITS}d}"
