"""The rows of a listing, gathered one by one without keeping an object for each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import SourceDamaged
from .record import MAX_KEY_BYTES
from .source import MAX_IMAGE_BYTES, Entries, entry_dtype

_PIECE_ROWS = 1 << 14


class GrowingTable:
    """Rows of a structured dtype, appended one at a time; text columns (S) get as wide as needed.

    The peak is the finished table and one piece of 16,384 rows.
    """

    def __init__(self, row: np.dtype[np.void]) -> None:
        self._row = row
        self._rows: list[tuple[Any, ...]] = []
        self._pieces: list[npt.NDArray[np.void]] = []

    def append(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) == _PIECE_ROWS:
            self._pack()

    def finish(self) -> npt.NDArray[np.void]:
        """All rows in the order they came; the table is empty afterwards."""
        self._pack()
        widest = np.result_type(self._row, *(piece.dtype for piece in self._pieces))
        whole = np.empty(sum(map(len, self._pieces)), widest)
        end = len(whole)
        while self._pieces:
            piece = self._pieces.pop()
            whole[end - len(piece) : end] = piece
            end -= len(piece)
        return whole

    def _pack(self) -> None:
        if self._rows:
            columns = zip(self._row.names or (), zip(*self._rows, strict=True), strict=True)
            self._pieces.append(np.array(self._rows, [(n, self._kind(n, values)) for n, values in columns]))
            self._rows = []

    def _kind(self, name: str, values: tuple[Any, ...]) -> str:
        kind = self._row[name].str
        return f"S{max(1, *map(len, values))}" if kind == "|S1" else kind


class EntryTable:
    """Builds ``Listing.entries`` of images in the archive, or below the folder, ``source``.

    Raises SourceDamaged for what no entry may be.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._table = GrowingTable(entry_dtype(1, 1))

    def append(
        self, key: str, label: int, *, length: int, path: bytes = b"", offset: int = 0, mtime_ns: int = 0
    ) -> None:
        raw = key.encode()
        if length > MAX_IMAGE_BYTES:
            raise SourceDamaged(
                f"has {length} bytes, but no image may have more than {MAX_IMAGE_BYTES}; take it away",
                path=self._source,
                key=key,
            )
        if len(raw) > MAX_KEY_BYTES:
            raise SourceDamaged(
                f"has a path of more than {MAX_KEY_BYTES} bytes; shorten it", path=self._source
            )
        self._table.append((raw, path, label, length, offset, mtime_ns))

    def finish(self) -> Entries:
        """The entries, each key there once."""
        entries = self._table.finish()
        check_unique(entries["key"], self._source)
        return entries


def check_unique(keys: npt.NDArray[np.bytes_], source: Path) -> None:
    """Raises SourceDamaged naming a key that is there twice. Costs 8 bytes per key.

    Equal keys have equal hashes, so only keys of equal hash need to be compared.
    """
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    hashes.sort()
    repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not repeated:
        return
    counts = Counter(key for key in keys.tolist() if hash(key) in repeated)
    twice = min((key for key, count in counts.items() if count > 1), default=None)
    if twice is not None:
        raise SourceDamaged(
            "two images have this record key; take one of them away", path=source, key=twice.decode()
        )
