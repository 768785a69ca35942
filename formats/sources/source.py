"""Interfaces of an image source, its listing and its reader, and the options for reading one."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardprepError, UsageError, printable
from shardprep.formats.records.record import UNLABELLED, LabelSpace
from shardprep.formats.records.schema import ColumnChoice, Schema, parse_column_choice
from shardprep.formats.runtime.json_record import parse_as
from shardprep.formats.runtime.progress import NoProgress, Progress, check_flags, is_number
from shardprep.formats.shards.columns import BOX_DTYPE, SIDES
from shardprep.formats.shards.dataset import SPLITS
from shardprep.formats.shards.read import Rows

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    **dict.fromkeys(("val", "valid", "validation", "eval"), "val"),
}
"""The split of each known name, in lower case."""

SPLIT_COLUMN = "split"
_WORD = re.compile(r"[a-z]+")


def split_from_cell(cell: object) -> str | None:
    """Return the split that a table cell names; None for any other value."""
    return SPLIT_NAMES.get(cell.strip().lower()) if isinstance(cell, str) else None


def split_folders(path: Path) -> dict[str, str]:
    """Return the split folders in a folder, in the order of SPLITS. Raises UsageError for two of one."""
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


def split_from_name(name: str) -> str | None:
    """Return the only split that occurs as a word in a file name; None without exactly one."""
    words = {SPLIT_NAMES[word] for word in _WORD.findall(name.lower()) if word in SPLIT_NAMES}
    return words.pop() if len(words) == 1 else None


@dataclass(frozen=True)
class Problem:
    """A kind of problem: its first error, and the number of cases."""

    first: ShardprepError | OSError
    count: int = 1

    def __str__(self) -> str:
        return f"{self._text}{self._count_note}"

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
        return {"count": self.count, "first": self._text, "exit_code": self.exit_code}

    @property
    def _count_note(self) -> str:
        return f" (the first of {self.count:,})" if self.count > 1 else ""

    def error(self, suffix: str) -> ShardprepError | OSError:
        """Return the first error with the number of cases and ``suffix`` at the end of its message."""
        if not isinstance(self.first, ShardprepError):
            return self.first
        whole = copy(self.first)
        whole.message += f"{self._count_note}{suffix}"
        return whole


class Problems:
    """The problems found so far, in the order of their first cases. Picklable."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Problem] = {}

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._by_kind.values())

    def __bool__(self) -> bool:
        return bool(self._by_kind)

    @property
    def case_count(self) -> int:
        return sum(problem.count for problem in self)

    def has(self, *kinds: str) -> bool:
        return not self._by_kind.keys().isdisjoint(kinds)

    def add(self, error: ShardprepError | OSError, kind: str = "", count: int = 1) -> None:
        """Count cases of one ``kind``; by default, errors with the same message are of one kind."""
        message = error.message if isinstance(error, ShardprepError) else error.strerror
        kind = kind or message or type(error).__name__
        problem = self._by_kind.get(kind, Problem(error, 0))
        self._by_kind[kind] = replace(problem, count=problem.count + count)

    def merge(self, others: Problems) -> None:
        for kind, problem in others._by_kind.items():
            self.add(problem.first, kind, problem.count)

    @contextmanager
    def collect(self, kind: str = "") -> Iterator[None]:
        """Collect a ShardprepError or OSError that the block raises, and suppress it."""
        try:
            yield
        except (ShardprepError, OSError) as error:
            self.add(error, kind)

    def raise_all(self) -> None:
        """Raise the first problem's error with all problems in its message; do nothing without problems."""
        if self:
            first, *others = self
            raise first.error("".join(f"; also: {other}" for other in others))


Entries = npt.NDArray[np.void]


def entry_dtype(key_bytes: int, path_bytes: int) -> np.dtype[np.void]:
    """Return the dtype of a listing: a record's key and label, and where its bytes are.

    ``path`` is relative to the source and empty in an archive; ``offset`` is 0 outside archives. ``mtime_ns``
    comes from :func:`.trees.wrap_mtime`, and is 0 in an archive. A source may add columns for its reader.
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
    """An archive that holds all images of a listing unchanged, at their ``offset``; ``size`` in bytes."""

    path: Path
    size: int


class ByteReader(ABC):
    """Reader of the bytes of entries. Picklable; only its open copies read, each in one thread."""

    @abstractmethod
    def open(self) -> AbstractContextManager[ByteReader]:
        """Return the context of an open copy. Leaving it raises SourceDamaged if the source has changed."""

    def expect(self, entries: Entries) -> None:
        """Announce the next entries in order, so that slow sources read ahead; some may be skipped."""
        return

    @abstractmethod
    def read(self, entry: np.void) -> bytes:
        """Return the entry's bytes. Raises SourceDamaged if they have changed or are missing."""

    @property
    def archive(self) -> WholeArchive | None:
        """The archive that can serve the images in place; None without one."""
        return None

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        """Return the encoded values of the listing's columns, in the order of its schema.

        Raises SourceDamaged like :meth:`read`, and BadValue for a value that its column cannot hold.
        """
        return ()

    def restrict_to(self, entries: Entries) -> ByteReader:
        """Return a reader of these entries only, so that a job is pickled without the others' tables."""
        return self

    @abstractmethod
    def location_of(self, entry: np.void) -> str:
        """Return the entry's location for messages: a path, or an archive and a byte offset."""


Resource = TypeVar("Resource")


class ResourceReader(ByteReader, Generic[Resource]):
    """Reader whose open copies have a ``resource``."""

    resource: Resource

    @abstractmethod
    def open_resource(self) -> AbstractContextManager[Resource]:
        """Return the context of the resource."""

    @contextmanager
    def open(self) -> Iterator[Self]:
        reader = copy(self)
        with self.open_resource() as reader.resource:
            yield reader


@dataclass(frozen=True)
class Archive:
    """A file of the source; ``name`` has no folder, and ``md5`` is the official one if it was checked.

    A file in object storage has an ``e_tag``, and 0 as ``mtime_ns``.
    """

    name: str
    size: int
    mtime_ns: int
    md5: str | None = None
    e_tag: str = ""

    @property
    def state(self) -> list[Any]:
        """JSON values that must be equal when a conversion is resumed."""
        return [self.name, self.size, self.mtime_ns, *([self.e_tag] if self.e_tag else [])]

    def to_json(self) -> dict[str, Any]:
        """Return the entry in the manifest, without times."""
        return {"name": self.name, "size": self.size, **({"md5": self.md5} if self.md5 else {})}


@dataclass(frozen=True)
class Listing:
    """All images of one split of a source, not yet read.

    ``entries`` (dtype of :func:`entry_dtype`) are in any order and have unique keys. ``expected`` is the
    expected number of images, None if unknown; ``shortfall`` describes the missing ones. ``problems``
    concern files that could not be listed. ``ignored`` counts skipped files and folders by name, such as
    hidden ones; ``notes`` are lines about other omissions. ``options`` are the options used, as the manifest
    keeps them. The reader returns the values of the columns in ``schema``, and images if ``has_images``.
    ``cache_key`` identifies entries that took long to list and are stored until the conversion is finished.
    ``random_read_bytes`` is the amount read in random order where each record needs its row group, else 0.
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
    cache_key: Mapping[str, Any] | None = None
    random_read_bytes: int = 0

    @property
    def is_partial(self) -> bool:
        """Whether images are missing, or surplus."""
        return bool(self.shortfall) or self.expected not in (None, len(self.entries))


BOX_ROW = np.dtype([("key", "S1"), *BOX_DTYPE.descr])
"""A box whose image has no record yet: a row of the box table with the image's key, as wide as needed."""


def boxes_by_key(rows: Rows, keys: npt.NDArray[np.bytes_], labels: LabelSpace) -> Rows:
    """Return rows of ``record``, ``label`` and sides as rows of BOX_ROW, sorted by their records' keys."""
    ordered = rows[np.argsort(keys[rows["record"]], kind="stable")]
    boxes = np.zeros(len(ordered), [("key", keys.dtype), *BOX_DTYPE.descr])
    boxes["key"], label = keys[ordered["record"]], ordered["label"]
    boxes["label"] = np.where((label >= 0) & (label < len(labels)), label, UNLABELLED)
    for side in SIDES:
        boxes[side] = ordered[side]
    return boxes


class Source(ABC):
    """A dataset to convert; ``OPTIONS`` names the options it accepts that not every source does.

    ``by_split`` has what each split consists of; ``progress`` receives the progress of a survey.
    """

    LAYOUT: ClassVar[str] = ""
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    by_split: Mapping[str, Any]
    progress: Progress = NoProgress()

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits found, in the order train, val, test."""
        return tuple(split for split in SPLITS if split in self.by_split)

    @property
    def description(self) -> str:
        """A one-line description for the user."""
        return f"{self.LAYOUT}: {', '.join(self.splits)}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Absolute folders, links resolved, where any new file may become an image."""
        return ()

    def survey(self, split: str, known_entries: Entries | None = None) -> Listing:
        """List the images of a split, and the problems of those that cannot be listed.

        Deterministic; reads headers and folder entries, never pixels, and not even headers if the entries
        are known from an earlier survey with the same :meth:`cache_key`. Raises UsageError for a missing
        split, DataError if nothing can be listed, and OSError if the source cannot be read.
        """
        if split not in self.splits:
            raise UsageError(f"the source has no split {split!r}; it has {', '.join(self.splits)}")
        return self.list_split(split, known_entries)

    @abstractmethod
    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        """Return the survey of an existing split."""

    def listing(self, split: str) -> Listing:
        """List all images of a split. Raises OSError, and DataError if there are problems with any."""
        listing = self.survey(split)
        listing.problems.raise_all()
        return listing

    def cache_key(self, split: str) -> Mapping[str, Any] | None:
        """Return JSON that determines a split's entries; None if only a survey can. Raises like a survey."""
        return None

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        """Return rows of BOX_ROW, by key and object, in the listing's ``labels``; None without boxes."""
        return None


@dataclass(frozen=True)
class SourceOptions:
    """Options for reading the source of a conversion. The manifest keeps all but ``root``.

    Args:
        follow_symlinks: Whether to follow symbolic links in an image tree or to the files of a list, within
            the source or not.
        skip_non_images: Whether to skip files of an image tree or a list whose names and first bytes are not
            those of images; damaged images are still errors.
        val_fraction: Fraction of each training class that becomes val, above 0 and below 1, for a source with
            only train; None for none.
        root: Folder that the paths of a list are relative to; None is the list's own.
        path_column: Column of paths in a CSV file, or key in a JSON Lines file; None finds the usual names.
        label_column: Column of labels of a list or of metadata; or the part, feature, column or component of
            a record file that is the label. None finds the usual names; empty is none.
        image_column: Part, feature, column or component of a record file (WebDataset, TFRecord, Parquet,
            tensorpack's LMDB) that is the image. None finds the usual names; empty is none.
        columns: Columns to convert, each as "NAME" or "NAME:KIND", or "NAME=HEADER" or "NAME:KIND=HEADER" if
            their header in a table differs. Kinds that are not given are guessed in a table. Record files
            give the names and kinds. Without any, those of a list are left out, and all others are taken.
        pairs: Folders of images that belong to the images, each as "NAME=FOLDER", relative to the split's
            folder or to the source, or absolute.
        coco: Path of COCO's instances file, relative to the source; None finds it.

    Raises:
        UsageError: A value is not valid.
    """

    follow_symlinks: bool = False
    skip_non_images: bool = field(default=False, kw_only=True)
    val_fraction: float | None = None
    root: str | os.PathLike[str] | None = None
    path_column: str | None = None
    label_column: str | None = None
    image_column: str | None = field(default=None, kw_only=True)
    columns: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    coco: str | None = None

    def __post_init__(self) -> None:
        flags = {"follow_symlinks": self.follow_symlinks, "skip_non_images": self.skip_non_images}
        check_flags(**flags)
        for name, flag in flags.items():
            object.__setattr__(self, name, bool(flag))
        if (share := self.val_fraction) is not None:
            if not is_number(share) or not 0 < share < 1:
                raise UsageError(f"the val fraction must be above 0 and below 1, not {share!r}")
            object.__setattr__(self, "val_fraction", float(share))
        for name in ("path_column", "label_column", "image_column", "coco"):
            if not isinstance(value := getattr(self, name), str | None):
                raise UsageError(f"{name} must be text, not {value!r}")
        for name in ("columns", "pairs"):
            value = getattr(self, name)
            texts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
            if not all(isinstance(text, str) for text in texts):
                raise UsageError(f"{name} must be a list of text, not {value!r}")
            object.__setattr__(self, name, texts)
        self.column_choices, self.pair_choices  # noqa: B018 - a wrong choice is an error here

    @cached_property
    def column_choices(self) -> tuple[ColumnChoice, ...]:
        """The columns of a table or of record files; the origin is the header."""
        choices = (parse_column_choice(text, "NAME[:KIND][=HEADER]") for text in self.columns)
        return tuple(choice._replace(origin=choice.origin or choice.name) for choice in choices)

    def takes(self, column: str) -> bool:
        """Whether to convert a column of record files: all, unless some are chosen."""
        return not self.columns or column in (choice.name for choice in self.column_choices)

    @property
    def pair_choices(self) -> tuple[ColumnChoice, ...]:
        """The paired folders; the origin is the folder."""
        choices = tuple(parse_column_choice(text, "NAME=FOLDER") for text in self.pairs)
        for choice, text in zip(choices, self.pairs, strict=True):
            if choice.kind or not choice.origin:
                raise UsageError(f"expected NAME=FOLDER, not {text!r}")
        return choices

    def kept(self, *names: str) -> dict[str, Any]:
        """Return the named options that are in use, by default all, as the manifest keeps them."""
        values = {name: getattr(self, name) for name in names or self._kept_names()}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, False, ())
        }

    @classmethod
    def _kept_names(cls) -> list[str]:
        return [each.name for each in fields(cls) if each.name != "root"]

    @classmethod
    def of_manifest(cls, source: Mapping[str, Any]) -> SourceOptions:
        """Return the options in a manifest's ``source``, which may hold anything. Raises UsageError."""
        hints, options = get_type_hints(cls), {}
        for name in cls._kept_names():
            with suppress(LookupError, TypeError, ValueError):
                options[name] = parse_as(hints[name], source[name])
        return cls(**options)


DECODED_SUFFIXES = (
    *(".tif", ".tiff", ".bmp", ".dib", ".gif", ".jp2", ".j2k", ".jpc"),
    *(".pbm", ".pgm", ".ppm", ".pnm", ".avif", ".ras", ".sr"),
)
"""Suffixes of images that a conversion decodes."""
IMAGE_SUFFIXES = (
    *(".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".apng", ".webp", *DECODED_SUFFIXES),
    *(".heic", ".heif", ".jxl", ".exr", ".hdr", ".pfm", ".pam"),  # listed only to be refused by name
)
"""Suffixes of possible images; the bytes decide."""
