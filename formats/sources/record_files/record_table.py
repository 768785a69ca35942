"""The records of a split, as they are found in its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import MAX_IMAGE_BYTES, MAX_KEY_BYTES
from shardprep.formats.sources.listing.entry_table import GrowingTable, official_key, repeated_keys
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import Entries, entry_dtype

_DIGITS = 8


class RecordTable:
    """The builder of ``Listing.entries`` for records in files below ``top``.

    Records over the limits are added to ``problems``.
    """

    def __init__(self, top: Path, problems: Problems) -> None:
        self._top = top
        self._problems = problems
        self._table = GrowingTable(entry_dtype(1, 1))

    def append(self, name: str, label: int, *, length: int, path: str, offset: int, mtime_ns: int) -> bool:
        """Append a record that has that name of its own, "" for none; return whether it was not refused."""
        if length > MAX_IMAGE_BYTES:
            too_large = f"has {length} bytes, but no record may have more than {MAX_IMAGE_BYTES}; remove it"
            place = f"{self._top / path}, byte {offset}"
            self._problems.add(SourceDamaged(too_large, path=place, key=name), "too large")
            return False
        self._table.append((key_of(name), path.encode(), label, length, offset, mtime_ns))
        return True

    def finish(self, *, may_number: bool) -> Entries:
        """Return the entries; their keys are the names of the records.

        If some have no name, or two have one, ``may_number`` gives all records keys of their file and number;
        without it these are problems.
        """
        entries = self._table.finish()
        repeated = repeated_keys(entries["key"])
        if may_number and (repeated or (entries["key"] == b"").any()):
            return _numbered(entries)
        for entry in entries[entries["key"] == b""]:
            no_key = f"has a name of more than {MAX_KEY_BYTES} bytes, or one that is no text; shorten it"
            self._problems.add(SourceDamaged(no_key, path=self._place(entry)), "no key")
        for key in filter(None, repeated):
            first, second = (self._place(entries[at]) for at in np.flatnonzero(entries["key"] == key)[:2])
            twice = f"begins here, and again at {first}; a key is for one sample, in one piece"
            self._problems.add(SourceDamaged(twice, path=second, key=key.decode()), "twice")
        return entries

    def _place(self, entry: np.void) -> str:
        return f"{self._top / entry['path'].decode()}, byte {entry['offset']}"


def key_of(name: str) -> bytes:
    """Return the key of a record with that name; none if it cannot be a key.

    The name of an image of ILSVRC12 gives the key that it has in other sources.
    """
    key = (official_key(name.rpartition("/")[2]) or name).encode(errors="surrogateescape")
    try:
        key.decode()
    except UnicodeDecodeError:
        return b""
    return key if len(key) <= MAX_KEY_BYTES and b"\0" not in key else b""


def _numbered(entries: Entries) -> Entries:
    """Return the entries with keys such as ``train-00000-of-00002/00000017``."""
    numbers = np.arange(len(entries))
    starts = np.ones(len(entries), np.bool_)
    starts[1:] = entries["path"][1:] != entries["path"][:-1]
    numbers -= np.maximum.accumulate(np.where(starts, numbers, 0))
    keys = np.char.add(entries["path"], b"/")
    keys = np.char.add(keys, np.char.zfill(numbers.astype("S"), _DIGITS))
    table = np.empty(len(entries), entry_dtype(keys.dtype.itemsize, entries["path"].dtype.itemsize))
    for column in table.dtype.names or ():
        table[column] = keys if column == "key" else entries[column]
    return table
