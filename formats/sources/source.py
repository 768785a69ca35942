"""The contracts of a source of images, its listing and its reader, and the options of reading one."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardprepError, UsageError, printable
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.records.schema import ColumnChoice, Schema, column_choice
from shardprep.formats.runtime.owned import not_copyable
from shardprep.formats.shards.columns import BOX_DTYPE, SIDES
from shardprep.formats.shards.files import Rows

SPLITS = ("train", "val", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    **dict.fromkeys(("val", "valid", "validation", "eval"), "val"),
}
"""The split that a name in lower case means."""

SPLIT_COLUMN = "split"
_WORD = re.compile(r"[a-z]+")


def split_of(cell: object) -> str | None:
    """Return the split that a cell of a table means; None for any other value."""
    return SPLIT_NAMES.get(cell.strip().lower()) if isinstance(cell, str) else None


def split_folders(path: Path) -> dict[str, str]:
    """Return the folders of splits in a folder, in the order of SPLITS. Raises UsageError for two of one."""
    found: dict[str, str] = {}
    with os.scandir(path) as entries:
        names = sorted(
            entry.name for entry in entries if entry.name.lower() in SPLIT_NAMES and entry.is_dir()
        )
    for name in names:
        split = SPLIT_NAMES[name.lower()]
        if split in found:
            raise UsageError(
                f"holds {found[split]} and {name}, both for {split}; move one of them away", path=path
            )
        found[split] = name
    return {split: found[split] for split in SPLITS if split in found}


def split_in(name: str) -> str | None:
    """Return the split that is a word of a file's name; None if there is none, or two."""
    words = {SPLIT_NAMES[word] for word in _WORD.findall(name.lower()) if word in SPLIT_NAMES}
    return words.pop() if len(words) == 1 else None


@dataclass(frozen=True)
class Problem:
    """One kind of problem: the error of the first case, and the number of cases."""

    first: ShardprepError | OSError
    count: int = 1

    def __str__(self) -> str:
        return f"{self._text}{self._of_how_many}"

    @property
    def _text(self) -> str:
        if isinstance(self.first, ShardprepError) or self.first.filename is None:
            return str(self.first)
        return f"{printable(str(self.first.filename))}: {self.first.strerror}"

    @property
    def exit_code(self) -> int:
        """The exit code of ``prep`` for this problem."""
        return getattr(self.first, "exit_code", ShardprepError.exit_code)

    def to_json(self) -> dict[str, Any]:
        """Return the problem as a JSON object."""
        return {"count": self.count, "first": self._text, "exit_code": self.exit_code}

    @property
    def _of_how_many(self) -> str:
        return f" (the first of {self.count:,})" if self.count > 1 else ""

    def error(self, others: str) -> ShardprepError | OSError:
        """Return the first case's error; its message counts the cases and ends with ``others``."""
        if not isinstance(self.first, ShardprepError):
            return self.first
        whole = copy(self.first)
        whole.message = f"{self.first.message}{self._of_how_many}{others}"
        return whole


class Problems:
    """The problems that were found so far, in the order of their first cases. Picklable."""

    def __init__(self) -> None:
        self._of_kind: dict[str, Problem] = {}

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._of_kind.values())

    def __bool__(self) -> bool:
        return bool(self._of_kind)

    @property
    def cases(self) -> int:
        """The number of cases of all kinds."""
        return sum(problem.count for problem in self)

    def add(self, error: ShardprepError | OSError, kind: str = "", count: int = 1) -> None:
        """Add cases. Those of one ``kind`` are counted together; by default these have one message."""
        alike = error.message if isinstance(error, ShardprepError) else error.strerror
        kind = kind or alike or type(error).__name__
        known = self._of_kind.get(kind, Problem(error, 0))
        self._of_kind[kind] = replace(known, count=known.count + count)

    def merge(self, others: Problems) -> None:
        """Add all cases of ``others``."""
        for kind, problem in others._of_kind.items():
            self.add(problem.first, kind, problem.count)

    @contextmanager
    def collected(self, kind: str = "") -> Iterator[None]:
        """Add the ShardprepError or OSError that leaves the block, which then ends without it."""
        try:
            yield
        except (ShardprepError, OSError) as error:
            self.add(error, kind)

    def raise_all(self) -> None:
        """Raise the first problem's error, with a message of all problems; return if there are none."""
        if not self._of_kind:
            return
        first, *others = self
        raise first.error("".join(f"; also: {other}" for other in others))


Entries = npt.NDArray[np.void]


def entry_dtype(key_bytes: int, path_bytes: int) -> np.dtype[np.void]:
    """Return the columns of a listing: a record's key and label, and the place of its bytes.

    ``path`` is relative to the source and empty in an archive; ``offset`` is 0 outside of one. ``mtime_ns``
    is the file's by :func:`.trees.mtime_of`, 0 in an archive. A source may add columns for its reader.
    """
    return np.dtype(
        [
            ("key", f"S{max(1, key_bytes)}"),
            ("path", f"S{max(1, path_bytes)}"),
            ("label", "<i4"),
            ("length", "<i8"),
            ("offset", "<i8"),
            ("mtime_ns", "<i8"),
        ]
    )


class WholeArchive(NamedTuple):
    """An archive that has all images of a listing, each as it is, at its ``offset``; ``size`` in bytes."""

    path: Path
    size: int


class ByteReader(AbstractContextManager["ByteReader"]):
    """Reader of an entry's bytes. Entering opens it for this process.

    Copyable and picklable while it is closed; raises NotCopyable while it is open. Not thread-safe. Leaving
    raises SourceDamaged if the source changed since it was opened.
    """

    def expect(self, entries: Entries) -> None:
        """Read ahead where answers take long: these entries are next, in this order; some may be left out."""
        return

    @abstractmethod
    def read(self, entry: np.void) -> bytes:
        """Return all bytes of the entry. Raises SourceDamaged if they have changed or are missing."""

    @property
    def archive(self) -> WholeArchive | None:
        """The archive that may keep the images; None without one."""
        return None

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        """Return the encoded values of the listing's columns, in the order of its schema.

        Raises SourceDamaged like :meth:`read`, and BadValue for a value that its column cannot hold.
        """
        return ()

    def only(self, entries: Entries) -> ByteReader:
        """Return a reader of these entries alone, to be pickled: a job needs no table of all others."""
        return self

    @abstractmethod
    def where(self, entry: np.void) -> str:
        """Return the entry's place for messages: a path, or an archive and a byte offset."""


Opened = TypeVar("Opened")


class OpeningReader(ByteReader, Generic[Opened]):
    """A reader from something that is open, in this process alone, while the reader is."""

    _context: AbstractContextManager[Opened] | None = None
    _opened: Opened | None = None

    @abstractmethod
    def opening(self) -> AbstractContextManager[Opened]:
        """Return the context that keeps it open."""

    def __enter__(self) -> Self:
        context = self.opening()
        self._opened, self._context = context.__enter__(), context
        return self

    def __exit__(self, *error: Any) -> None:
        context, self._context, self._opened = self._context, None, None
        if context is not None:
            context.__exit__(*error)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self._context is not None:
            raise not_copyable(self, "leave its context first, or copy it before it is entered")
        return super().__reduce_ex__(protocol)

    @property
    def opened(self) -> Opened:
        """The open object. Raises ValueError if none is."""
        if self._opened is None:
            raise ValueError("the reader is closed")
        return self._opened


@dataclass(frozen=True)
class Archive:
    """A file of the source: its name, never a path; ``md5`` and ``verified`` are the result of the check.

    A file in object storage has an ``e_tag``, and 0 as ``mtime_ns``.
    """

    name: str
    size: int
    mtime_ns: int
    md5: str | None = None
    verified: str = "no"
    e_tag: str = ""

    @property
    def state(self) -> list[Any]:
        """Values that must be equal when a conversion is resumed, as JSON."""
        return [self.name, self.size, self.mtime_ns, *([self.e_tag] if self.e_tag else [])]

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's copy: nothing that depends on the time; the MD5 if it is the official."""
        checked = {"md5": self.md5} if self.verified == "md5" else {}
        return {"name": self.name, "size": self.size, **checked}


@dataclass(frozen=True)
class Listing:
    """One split of a source: every image, not yet read.

    ``entries`` (dtype of :func:`entry_dtype`) are in any order and have unique keys; ``expected`` is the
    number of images that there should be, None if it is unknown; ``shortfall`` says which are missing.
    ``problems`` are those of files that could not be listed. ``ignored`` counts the files and folders of file
    managers, hidden ones, and others that were left out, by name; ``notes`` are lines about what else was.
    ``options`` are those that the source was read with, as the manifest keeps them. ``schema`` has the
    columns of which the reader gives the values; without ``has_images`` it gives no images. ``kept_by`` is
    what decides the entries, if they took long, so that they are kept until the conversion is finished.
    """

    split: str
    layout: str
    entries: Entries
    labels: LabelSpace
    reader: ByteReader
    archives: tuple[Archive, ...] = ()
    expected: int | None = None
    shortfall: str = ""
    problems: Problems = field(default_factory=Problems)
    ignored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    schema: Schema = field(default_factory=Schema)
    has_images: bool = True
    kept_by: Mapping[str, Any] | None = None

    @property
    def is_partial(self) -> bool:
        """Whether images are missing, or there are too many."""
        return bool(self.shortfall) or self.expected not in (None, len(self.entries))


BOX_ROW = np.dtype([("key", "S1"), *BOX_DTYPE.descr])
"""A box before its image has a record: a row of the boxes' table with its image's key, as wide as needed."""


def boxes_by_key(rows: Rows, keys: npt.NDArray[np.bytes_], labels: LabelSpace) -> Rows:
    """Return the boxes in rows of ``record``, ``label`` and sides, by the keys of their records."""
    ordered = rows[np.argsort(keys[rows["record"]], kind="stable")]
    boxes = np.zeros(len(ordered), [("key", keys.dtype), *BOX_DTYPE.descr])
    boxes["key"], label = keys[ordered["record"]], ordered["label"]
    boxes["label"] = np.where((label >= 0) & (label < len(labels)), label, UNLABELLED)
    for side in SIDES:
        boxes[side] = ordered[side]
    return boxes


class Source(ABC):
    """A dataset to convert; ``TAKES`` are the options that it takes of those that not all sources do."""

    LAYOUT: ClassVar[str] = ""
    TAKES: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits that were found, in the order train, val, test."""

    @property
    def description(self) -> str:
        """One line for the user that describes the source."""
        return f"{self.LAYOUT}: {', '.join(self.splits)}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders, absolute and without links, where any new file may become an image."""
        return ()

    def survey(self, split: str, known: Entries | None = None) -> Listing:
        """Return every image of a split that can be listed, and the problems of the others.

        Deterministic; reads headers and folder entries, never pixels, and not even headers for the entries
        ``known`` from an earlier survey by the same :meth:`known_by`. Raises UsageError for a split that is
        not there, DataError if nothing can be listed, and OSError if the source cannot be read.
        """
        if split not in self.splits:
            raise UsageError(f"the source has no split {split!r}; it has {', '.join(self.splits)}")
        return self.listed(split, known)

    @abstractmethod
    def listed(self, split: str, known: Entries | None) -> Listing:
        """Return the survey of a split that is there."""

    def listing(self, split: str) -> Listing:
        """Return every image of a split.

        Raises DataError if the source is damaged, contradicts itself, or holds links, devices, duplicate or
        hostile names, with the number of problems and the first of each kind, and OSError.
        """
        listing = self.survey(split)
        listing.problems.raise_all()
        return listing

    def known_by(self, split: str) -> Mapping[str, Any] | None:
        """Return all that decides a split's entries, as JSON; None if only a survey tells. Raises as it."""
        return None

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        """Return the split's annotated boxes, ordered by key and by object; None if it has none.

        They are rows of BOX_ROW, whose ``labels`` are those of the split's listing.
        """
        return None


_KEPT = {
    "follow_symlinks": bool,
    "skip_non_images": bool,
    "val_fraction": float,
    "path_column": str,
    "label_column": str,
    "image_column": str,
    "columns": list,
    "pairs": list,
    "coco": str,
}


@dataclass(frozen=True)
class SourceOptions:
    """Options of a conversion that say how its source is read.

    All but ``root`` are kept in the manifest.

    Args:
        follow_symlinks: Whether to read what symbolic links in an image tree or to the files of a list point
            to, within the source or not.
        skip_non_images: Whether to leave out files of an image tree or a list that are not images by their
            names and first bytes; damaged images are still errors.
        val_fraction: Fraction of each training class that becomes val, above 0 and below 1, for a source with
            only train; None for none.
        root: Folder that the paths of a list are relative to; None is the list's own.
        path_column: Column of paths in a CSV file, or key in a JSON Lines file; None finds the usual names.
        label_column: Column of labels of a list or of metadata; or the part, feature, column or component of
            a record file that is the label. None finds the usual names; empty is none.
        image_column: Part, feature, column or component of a record file (WebDataset, TFRecord, Parquet,
            tensorpack's LMDB) that is the image. None finds the usual names; empty is none.
        columns: Columns of a list, ``metadata.csv`` or ``metadata.jsonl`` to convert, each as "NAME:KIND" or
            "NAME:KIND=HEADER". Without any, those of a list are left out, and all of metadata are taken with
            guessed kinds.
        pairs: Folders of images that belong to the images, each as "NAME=FOLDER", relative to the split's
            folder or to the source, or absolute.
        coco: Path of COCO's instances file, relative to the source; None finds it.

    Raises:
        UsageError: A value is not valid.
    """

    follow_symlinks: bool = False
    skip_non_images: bool = False
    val_fraction: float | None = None
    root: str | os.PathLike[str] | None = None
    path_column: str | None = None
    label_column: str | None = None
    image_column: str | None = None
    columns: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    coco: str | None = None

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise UsageError(f"the val fraction must be above 0 and below 1, not {self.val_fraction}")
        for name in ("columns", "pairs"):
            if isinstance(given := getattr(self, name), str):
                raise UsageError(f"{name} must be a list, such as [{given!r}]")
            object.__setattr__(self, name, tuple(given))
        self.column_choices, self.pair_choices  # noqa: B018 - a wrong choice is an error here

    @property
    def column_choices(self) -> tuple[ColumnChoice, ...]:
        """The columns of a table; the origin is the header."""
        choices = tuple(column_choice(text, "NAME:KIND or NAME:KIND=HEADER") for text in self.columns)
        for choice, text in zip(choices, self.columns, strict=True):
            if not choice.kind:
                raise UsageError(f"expected NAME:KIND or NAME:KIND=HEADER, not {text!r}")
        return tuple(choice._replace(origin=choice.origin or choice.name) for choice in choices)

    @property
    def pair_choices(self) -> tuple[ColumnChoice, ...]:
        """The paired folders; the origin is the folder."""
        choices = tuple(column_choice(text, "NAME=FOLDER") for text in self.pairs)
        for choice, text in zip(choices, self.pairs, strict=True):
            if choice.kind or not choice.origin:
                raise UsageError(f"expected NAME=FOLDER, not {text!r}")
        return choices

    @property
    def in_use(self) -> dict[str, Any]:
        """The options that the manifest keeps and that are in use, by name."""
        return self.kept(*_KEPT)

    def kept(self, *names: str) -> dict[str, Any]:
        """Return those of the named options that are in use, as the manifest keeps them."""
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, False, ())
        }

    @classmethod
    def of_manifest(cls, source: Mapping[str, Any]) -> SourceOptions:
        """Return the options in a manifest's ``source``, which may hold anything. Raises UsageError."""
        found = {name: source[name] for name, kind in _KEPT.items() if type(source.get(name)) is kind}
        for name in ("columns", "pairs"):
            if not all(isinstance(text, str) for text in found.get(name, ())):
                del found[name]
        return cls(**found)


IMAGE_SUFFIXES = (
    *(".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif"),
    *(".jp2", ".j2k", ".jpc", ".pbm", ".pgm", ".ppm", ".pnm", ".avif", ".ras", ".sr"),
    *(".heic", ".heif", ".jxl", ".exr", ".hdr", ".pfm", ".pam"),  # found, to be refused by name
)
"""The suffixes of files that may be images; their bytes decide."""
