"""The rows of a listing, collected without an object for each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import MAX_IMAGE_BYTES, MAX_KEY_BYTES

from .problems import Problems
from .source import Entries, entry_dtype

_PIECE_ROWS = 1 << 14


class GrowingTable:
    """Rows of a structured dtype, appended one at a time; text columns (S) get as wide as needed.

    The peak of memory is the finished table and one piece of 16,384 rows.
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
        """Return all rows in the order they were appended; the table is empty afterwards."""
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
    """The builder of ``Listing.entries`` for images in the archive, or below the folder, ``source``.

    Entries over the limits, and repeated keys, are added to ``problems``; None raises SourceDamaged for them.
    ``more`` are further columns of the entries, by name and dtype, for the source's reader.
    """

    def __init__(
        self, source: Path | str, problems: Problems | None = None, more: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._source = source
        self._problems = problems
        row = entry_dtype(1, 1)
        self._table = GrowingTable(np.dtype([*((name, row[name]) for name in row.names or ()), *more]))

    def append(
        self,
        key: str,
        label: int,
        *,
        length: int,
        path: bytes = b"",
        offset: int = 0,
        mtime_ns: int = 0,
        more: tuple[Any, ...] = (),
    ) -> bool:
        """Append a row, with the values of the further columns; return whether it was, and not refused."""
        raw = key.encode()
        if length > MAX_IMAGE_BYTES:
            too_large = f"has {length} bytes, but no image may have more than {MAX_IMAGE_BYTES}; remove it"
            self._refuse(SourceDamaged(too_large, path=self._source, key=key), "too large")
        elif max(len(raw), len(path)) > MAX_KEY_BYTES:
            too_long = f"has a path of more than {MAX_KEY_BYTES} bytes; shorten it"
            self._refuse(SourceDamaged(too_long, path=self._source))
        else:
            self._table.append((raw, path, label, length, offset, mtime_ns, *more))
            return True
        return False

    def _refuse(self, error: SourceDamaged, kind: str = "") -> None:
        if self._problems is None:
            raise error
        self._problems.add(error, kind)

    def finish(self, lines: Sequence[int] = ()) -> Entries:
        """Return the entries, after checking that each key is unique.

        ``lines`` are the numbers of the entries' lines in ``source``, which then are named.
        """
        entries = self._table.finish()
        for key in repeated_keys(entries["key"]):
            twice = "two images have this record key; remove one of them"
            if lines:
                first, second = (lines[place] for place in np.flatnonzero(entries["key"] == key)[:2])
                twice = f"lines {first} and {second} have one record key; remove one of them"
            self._refuse(SourceDamaged(twice, path=self._source, key=key.decode()), "twice")
        return entries


def repeated_keys(keys: npt.NDArray[np.bytes_]) -> list[bytes]:
    """Return the keys that occur more than once, sorted. Takes 8 bytes per key.

    Equal keys have equal hashes, so only keys of equal hash are compared.
    """
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    hashes.sort()
    repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not repeated:
        return []
    counts = Counter(key for key in keys.tolist() if hash(key) in repeated)
    return sorted(key for key, count in counts.items() if count > 1)


_TRAIN = re.compile(r"(n\d{8})_\d+", re.ASCII)


_FLAT = re.compile(r"ILSVRC2012_(?:val|test)_\d{8}", re.ASCII)


_IMAGE = re.compile(r"(.+)\.(?:JPEG|jpeg|jpg)", re.DOTALL)


def record_key(class_name: str, relative_path: str) -> str:
    """Return the key of the image at ``relative_path`` (with ``/``) below its split's folder.

    The key of ``n01440764_7.JPEG`` of class n01440764 is ``n01440764/n01440764_7``, and that of a validation
    or test image its stem, so that tars, trees and Kaggle agree. That of any other file is its path.
    """
    image = _IMAGE.fullmatch(relative_path.rpartition("/")[2])
    key = official_key(image[1]) if image else None
    if key is None or ("/" in key and not key.startswith(class_name + "/")):
        return relative_path
    return key


def official_key(stem: str) -> str | None:
    """Return the key of an image by its official name without extension; None for any other name."""
    if train := _TRAIN.fullmatch(stem):
        return f"{train[1]}/{stem}"
    return stem if _FLAT.fullmatch(stem) else None
