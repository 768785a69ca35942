"""The entries of a listing: their table, keys, classes and storage, and images that were not listed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import (
    MAX_IMAGE_BYTES,
    MAX_KEY_BYTES,
    MAX_WORDS,
    UNLABELLED,
    LabelSpace,
    official_words,
)
from shardprep.formats.runtime.files import errors_as_damage, open_for_publishing, read_small_file
from shardprep.formats.runtime.json_record import sha256_of
from shardprep.formats.sources.source import Entries, Problems, entry_dtype
from shardprep.formats.sources.trees import FolderWalk, FoundFile, is_image

_PIECE_ROWS = 1 << 14


class GrowingTable:
    """A growing array of a structured dtype; text columns (S) become as wide as needed."""

    def __init__(self, row: np.dtype[np.void]) -> None:
        self._row = row
        self._rows: list[tuple[Any, ...]] = []
        self._pieces: list[npt.NDArray[np.void]] = []

    def append(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) == _PIECE_ROWS:
            self._pack()

    def finish(self) -> npt.NDArray[np.void]:
        """Return all rows in the order they were appended, and empty the table."""
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
            kinds = []
            for name, values in zip(self._row.names or (), zip(*self._rows, strict=True), strict=True):
                kind = self._row[name].str
                kinds.append((name, f"S{max(1, *map(len, values))}" if kind == "|S1" else kind))
            self._pieces.append(np.array(self._rows, kinds))
            self._rows = []


class EntryTable:
    """Builder of ``Listing.entries`` for images in an archive or below a folder, ``source``.

    Entries over the limits, and repeated keys and files, are added to ``problems``. ``extra`` are the names
    and dtypes of extra columns for the source's reader.
    """

    def __init__(self, source: Path | str, problems: Problems, extra: Sequence[tuple[str, str]] = ()) -> None:
        self._source, self._problems = source, problems
        row = entry_dtype(1, 1)
        self._table = GrowingTable(np.dtype([*((name, row[name]) for name in row.names or ()), *extra]))

    def append(
        self,
        key: str,
        label: int,
        *,
        length: int,
        offset: int = 0,
        file: FoundFile | None = None,
        extra: tuple[Any, ...] = (),
    ) -> None:
        """Append a row with the values of the extra columns, or refuse it.

        For an image in a folder, ``file`` is its file, and ``length`` includes the bytes of its columns.
        """
        path, mtime_ns, size = (file.path.encode(), file.mtime_ns, file.size) if file else (b"", 0, length)
        raw = key.encode()
        if size > MAX_IMAGE_BYTES:
            too_large = f"has {size} bytes; an image has at most {MAX_IMAGE_BYTES}; remove it"
            self._problems.add(SourceDamaged(too_large, path=self._source, key=key), "too large")
        elif max(len(raw), len(path)) > MAX_KEY_BYTES:
            too_long = f"has a path of more than {MAX_KEY_BYTES} bytes; shorten it"
            self._problems.add(SourceDamaged(too_long, path=self._source, key=key))
        else:
            self._table.append((raw, path, label, length, offset, mtime_ns, *extra))

    def finish(self) -> Entries:
        """Return the entries; repeated keys and files are problems, located by the column ``line`` if any."""
        entries = self._table.finish()
        has_lines = "line" in (entries.dtype.names or ())
        for column, what in (("key", "record key"), ("path", "file"))[: 1 + has_lines]:
            if repeated := repeated_keys(entries[column]):
                message, key = f"two images have this {what}; remove one of them", repeated[0]
                if has_lines:
                    first, second = entries["line"][entries[column] == key][:2].tolist()
                    message = f"lines {first} and {second} have the same {what}; remove one of them"
                error = SourceDamaged(message, path=self._source, key=key.decode())
                self._problems.add(error, "twice", len(repeated))
                break
        return entries


def repeated_keys(keys: npt.NDArray[np.bytes_]) -> list[bytes]:
    """Return the keys that occur more than once, sorted. Needs 8 bytes per key: only hashes are sorted."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    hashes.sort()
    repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not repeated:
        return []
    counts = Counter(key for key in keys.tolist() if hash(key) in repeated)
    return sorted(key for key, count in counts.items() if count > 1)


MAX_CLASSES = 100_000
MAX_NAME = 255  # characters of a class's name
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
# as names, 10.0 would come before 2.0
_NOT_A_LABEL = re.compile(r"-[0-9]+|[+-]?([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.ASCII | re.IGNORECASE)


class Classes:
    """The classes of all records of a source: either names or numbers, or else its folders.

    An added label gets a number, which :meth:`assign_labels` maps to the final one. Names are numbered
    alphabetically. Numbers stay the same. Their names become class names if they are sorted like the numbers;
    otherwise class names are numbers such as ``00042``, and the names their words. Wnids of ILSVRC12 in order
    give its 1,000 classes. Folders are classes if nothing else is, there are two or more, and every image
    lies in one; otherwise no image has a label.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._digits: dict[int, str] = {}
        self._count = 0
        self._words: dict[int, str] = {}
        self._folders: dict[str, int] = {}
        self._are_folders = True

    def add_number(self, label: int, words: str | None = None) -> int:
        """Add a label that is a number, -1 for none, and its name. Raises ValueError for an invalid one."""
        if not UNLABELLED <= label < MAX_CLASSES:
            raise ValueError(f"has the label {label}; labels are 0 to {MAX_CLASSES - 1}")
        if self._names:
            raise ValueError(f"has the label {str(label)!r}, but the first one is a name; use one kind")
        if words is not None:
            self._add_name(label, words)
        self._are_folders = False
        self._count = max(self._count, label + 1)
        return label

    def _add_name(self, label: int, words: str) -> None:
        if not 0 < len(words) <= MAX_WORDS:
            raise ValueError(f"its class has a name of {len(words)} characters, not 1 to {MAX_WORDS}")
        words.encode()
        if label == UNLABELLED:
            raise ValueError(f"its label {label} means unlabelled, but it has the class name {words!r}")
        if (first := self._words.setdefault(label, words)) != words:
            raise ValueError(f"its label {label} is named {words!r} here and {first!r} elsewhere")

    def add_text(self, text: str | bytes) -> int:
        """Add a label that is a name or a number, "" for none. Raises ValueError for an invalid one."""
        text = text if isinstance(text, str) else text.decode()
        self._are_folders = False
        if not text:
            return UNLABELLED
        if len(text) > MAX_NAME:
            raise ValueError(f"has a label of {len(text)} characters, not 1 to {MAX_NAME}")
        is_number = _NUMBER.fullmatch(text) is not None
        if _NOT_A_LABEL.fullmatch(text) or (is_number and int(text) >= MAX_CLASSES):
            raise ValueError(
                f"has the label {text}, but labels are names, or integers from 0 to {MAX_CLASSES - 1}"
            )
        if is_number:
            if (first := self._digits.setdefault(int(text), text)) != text:
                raise ValueError(
                    f"has the label {text!r}, but elsewhere {first!r}; use one for both, or names"
                )
            return self.add_number(int(text))
        if self._count:
            raise ValueError(f"has the label {text!r}, but the first one is a number; use one kind")
        text.encode()
        label = self._names.setdefault(text, len(self._names))
        if label >= MAX_CLASSES:
            raise ValueError(f"has the class {text!r}, which exceeds the limit of {MAX_CLASSES} classes")
        return label

    def add_folder(self, path: str) -> int:
        """Add the folder of the image at ``path`` below its split's folder, if there is one."""
        folder, inside, _ = path.partition("/")
        if not inside:
            self._are_folders = False
            return UNLABELLED
        return -2 - self._folders.setdefault(folder, len(self._folders))

    def assign_labels(self) -> tuple[LabelSpace, npt.NDArray[np.int32]]:
        """Return the label space, and an array that maps each number, negative ones too, to its label."""
        folders = self._folders if self._are_folders and len(self._folders) > 1 else {}
        space = self._number_space() if self._count else LabelSpace.of(self._names or folders)
        labels = [*range(self._count), *(space.label_of[name] for name in self._names)]
        of_folders = [space.label_of[name] if folders else UNLABELLED for name in self._folders]
        return space, np.array([*labels, *of_folders[::-1], UNLABELLED], np.int32)

    def _number_space(self) -> LabelSpace:
        official, words = list(official_words()), self._words
        if words and self._count <= len(official) and all(official[n] == words[n] for n in words):
            return LabelSpace.of(official)
        names = [words.get(label, "") for label in range(self._count)]
        if all(names) and all(name < following for name, following in pairwise(names)):
            return LabelSpace.of(names)
        numbers = [f"{label:05d}" for label in range(self._count)]
        return LabelSpace.of(numbers, {numbers[label]: name for label, name in words.items()})


_TRAIN = re.compile(r"(n\d{8})_\d+", re.ASCII)
_FLAT = re.compile(r"ILSVRC2012_(?:val|test)_\d{8}", re.ASCII)
_IMAGE = re.compile(r"(.+)\.(?:JPEG|jpeg|jpg)", re.DOTALL)


def record_key(class_name: str, relative_path: str) -> str:
    """Return the key of the image at ``relative_path`` (with ``/``) below its split's folder.

    For ``n01440764_7.JPEG`` of class n01440764 it is ``n01440764/n01440764_7``, and for a validation or test
    image its stem, so that tars, trees and Kaggle agree. For any other file it is the path.
    """
    image = _IMAGE.fullmatch(relative_path.rpartition("/")[2])
    key = official_key(image[1]) if image else None
    if key is None or ("/" in key and not key.startswith(class_name + "/")):
        return relative_path
    return key


def official_key(stem: str) -> str | None:
    """Return the key of an image with an official name, without its extension; None for other names."""
    if train := _TRAIN.fullmatch(stem):
        return f"{train[1]}/{stem}"
    return stem if _FLAT.fullmatch(stem) else None


class StoredEntries:
    """The entries of a split, stored in a folder under a hash of :meth:`.source.Source.cache_key`.

    A changed source therefore has another file.
    """

    def __init__(self, folder: Path, cache_key: Mapping[str, Any]) -> None:
        digest = sha256_of(dict(cache_key)).removeprefix("sha256:")
        self._path = folder / f"entries-{digest[:32]}"

    def read(self) -> Entries | None:
        """Return the entries; None if they are not stored. Raises SourceDamaged, OSError."""
        if not self._path.exists():
            return None
        with errors_as_damage(self._path, "remove this file"):
            entries: Entries = np.load(self._path, allow_pickle=False)
        return entries

    def write(self, entries: Entries, run: Path) -> None:
        """Store the entries; ``run`` is the folder for unfinished files."""
        array = BytesIO()  # written to a file, NumPy would not say that the disk is full
        np.save(array, entries, allow_pickle=False)
        with open_for_publishing(self._path, run) as file:
            file.write(array.getbuffer())


def find_unlisted(walk: FolderWalk, place: str, listed: npt.NDArray[np.bytes_]) -> list[Path]:
    """Return the images in the walk's folder ``place`` that are not ``listed``."""
    table = GrowingTable(np.dtype([("path", "S1")]))
    for file in walk.files_below(place):
        if is_image(file):
            table.append((f"{place}/{file.path}".lstrip("/").encode(),))
    return [walk.top / path.decode() for path in np.setdiff1d(table.finish()["path"], listed).tolist()]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a small file of UTF-8 text. Raises ValueError for other encodings."""
    return read_small_file(path).decode("utf-8-sig").splitlines()
