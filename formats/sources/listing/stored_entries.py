"""The entries of a split in a file, for other processes that list the same source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import read_table, write_table
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.system.atomic_write import hash_file, publish_bytes, publishing

from .source import Entries, entry_dtype

_PREFIX_CHARACTERS = len("sha256:")
_NAME_CHARACTERS = 32


class StoredEntries:
    """The entries of a split, stored in a folder under a name that is made of all that decides them.

    ``known_by`` is that of :meth:`.source.Source.known_by`. A source that has changed has another name, and a
    file that is damaged counts as none.
    """

    def __init__(self, folder: Path, known_by: Mapping[str, Any]) -> None:
        digest = sha256_of(dict(known_by))[_PREFIX_CHARACTERS:]
        self._table = folder / f"listing-{digest[:_NAME_CHARACTERS]}.npy"
        self._entry = self._table.with_suffix(".json")

    def read(self) -> Entries | None:
        """Return the entries; None if they are not stored, or damaged. Raises OSError."""
        try:
            entry = FileEntry(**parse_canonical_json(self._entry.read_bytes()))
            return read_table(self._table, entry, _row_of)
        except (FileNotFoundError, ManifestDamaged, TypeError, ValueError):
            return None

    def write(self, entries: Entries, run: Path) -> None:
        """Store the entries; ``run`` is the folder of unfinished files."""
        rows = entries.astype(_row_of(entries.dtype.itemsize))
        with publishing(self._table, run) as file:
            write_table(file, rows)
        size, sha256 = self._table.stat().st_size, hash_file(self._table)
        entry = FileEntry(self._table.name, size, sha256, len(rows))
        publish_bytes(self._entry, canonical_json(entry.to_json()), run)


def _row_of(width: int) -> np.dtype[np.void] | None:
    """Return the columns of entries in an archive, which have no path, by the bytes of a row."""
    return entry_dtype(1 + width - entry_dtype(1, 1).itemsize, 1)
