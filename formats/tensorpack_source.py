"""An LMDB that tensorpack's LMDBSerializer wrote: one split, its images under running numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .archive_file import ArchiveFile
from .entry_table import EntryTable
from .errors import SourceDamaged, UsageError
from .labels import LabelSpace
from .official_archives import archive_of
from .recognised_source import no_such_split
from .source import Entries, Listing, Source
from .tar_reader import TarReader
from .tensorpack_datapoint import (
    DIGITS,
    KEYS,
    Datapoint,
    Decode,
    check_key,
    decoder_of,
    is_key,
    read_datapoint,
    read_keys,
)
from .tensorpack_lmdb import LmdbRecords, is_lmdb
from .tensorpack_reader import TextReader
from .tensorpack_value import Value

LAYOUT = "tensorpack-lmdb"

_FILE_IN_FOLDER = "data.mdb"
_KEYS = KEYS.decode()


def tensorpack_lmdb(path: Path, split: str) -> TensorpackLmdb | None:
    """The LMDB at a path, or in the folder there, taken for ``split``; None where there is none.

    Raises UsageError for one that somebody else wrote, SourceDamaged, OSError.
    """
    file = path / _FILE_IN_FOLDER if path.is_dir() else path
    if not is_lmdb(file):
        return None
    with ArchiveFile(file) as archive:
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
    """The classes are named for the numbers that the labels are in the file, as ``00042``: each label stays
    what it was. A record's key is that of the file, filled up with zeros where others have more digits.
    """

    path: Path
    split: str

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,)

    @property
    def description(self) -> str:
        return f"{LAYOUT}: {self.split}"

    def listing(self, split: str) -> Listing:
        if split != self.split:
            raise no_such_split(split, self.splits)
        with ArchiveFile(self.path) as archive:
            archive.expect_random_reads()
            contents = _Contents(self.path)
            for key, value in LmdbRecords(archive):
                contents.add(key, value)
        entries = contents.entries()
        expected, shortfall = contents.completeness(entries)
        reader = TextReader if contents.as_text else TarReader
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=entries,
            labels=LabelSpace.of(f"{label:05d}" for label in range(contents.classes)),
            reader=reader(self.path, archive.identity),
            archives=(archive_of(self.path),),
            expected=expected,
            shortfall=shortfall,
        )


class _Contents:
    """What was found of a file so far. Raises SourceDamaged for what LMDBSerializer does not write."""

    def __init__(self, path: Path) -> None:
        self.as_text: bool | None = None
        self.classes = 0
        self._path = path
        self._table = EntryTable(path)
        self._decode: Decode | None = None
        self._listed: npt.NDArray[np.int64] | None = None

    def add(self, key: bytes, value: Value) -> None:
        try:
            self._decode = self._decode or decoder_of(value)
            if key == KEYS:
                self._listed = read_keys(value, self._decode)
            else:
                self._add(check_key(key), value.offset, read_datapoint(value, self._decode))
        except ValueError as error:
            raise self._damaged(str(error), _shown(key)) from None

    def _add(self, key: str, offset: int, point: Datapoint) -> None:
        image, label = point
        if image.length:
            if self.as_text not in (None, image.latin1):
                raise ValueError("some images are stored as bytes and some as text")
            self.as_text = image.latin1
        self._table.append(key, label, length=image.length, offset=offset + image.start)
        self.classes = max(self.classes, label + 1)

    def entries(self) -> Entries:
        """All entries; where keys differ in length, zeros before the short ones let them sort as numbers."""
        entries = self._table.finish()
        digits = entries["key"].dtype.itemsize
        if digits > DIGITS:
            entries["key"] = np.char.zfill(entries["key"], digits)
        return entries

    def completeness(self, entries: Entries) -> tuple[int, str]:
        """How many records there are by the file's own list, and a phrase on what is missing."""
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
        return SourceDamaged(f"{reason}; write the LMDB again", path=self._path, key=key)


def _shown(key: bytes) -> str:
    text = key.decode(errors="backslashreplace")
    return text if text.isprintable() else ascii(text)


def _named(number: np.int64) -> str:
    return f"{number:0{DIGITS}d}"
