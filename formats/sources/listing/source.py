"""The contracts of a source of images, its listing and the reader of its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.system.owned import not_copyable

from .problems import Problems

SPLITS = ("train", "val", "test")

Entries = npt.NDArray[np.void]


def entry_dtype(key_bytes: int, path_bytes: int) -> np.dtype[np.void]:
    """Return the columns of a listing: a record's key and label, and the place of its bytes.

    ``path`` is relative to the source and empty in an archive; ``offset`` is 0 outside of one.
    ``mtime_ns`` is the file's by :func:`.tree_files.mtime_of`, 0 in an archive; it shows that a source has
    changed since it was planned. A source may add columns for its reader.
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
        """Note that these entries are read next, in this order; some may be left out.

        A reader for which each answer takes long reads ahead.
        """
        return

    @abstractmethod
    def read(self, entry: np.void) -> bytes:
        """Return all bytes of the entry. Raises SourceDamaged if they have changed or are missing."""

    @property
    def archive(self) -> WholeArchive | None:
        """The archive in which the images may stay; None if there is none."""
        return None

    @property
    def is_open(self) -> bool:
        """Whether the reader was entered and not left; always false for a reader that opens nothing."""
        return False

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self.is_open:
            raise not_copyable(self, "leave its context first, or copy it before it is entered")
        return super().__reduce_ex__(protocol)

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


@dataclass(frozen=True)
class Archive:
    """A file of the source: its name, never a path; ``md5`` and ``verified`` are what was checked.

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
        """What must be equal when a conversion goes on, as JSON."""
        return [self.name, self.size, self.mtime_ns, *([self.e_tag] if self.e_tag else [])]

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest keeps: nothing that depends on the time or on what was checked."""
        return {"name": self.name, "size": self.size}


@dataclass(frozen=True)
class Listing:
    """One split of a source: every image, not yet read.

    ``entries`` (dtype of :func:`entry_dtype`) are in any order and have unique keys; ``expected`` is the
    number of images that there should be, None if it is unknown. ``problems`` are those of files that could
    not be listed. ``ignored`` counts the files and folders of file managers, and hidden ones, that were left
    out, by name. ``options`` are those that the source was read with, as the manifest keeps them. ``schema``
    has the columns beside key, label and image, of which the reader gives the values; ``has_images`` is False
    for records without an image, of which the reader gives no bytes. ``kept_by`` is what decides the
    entries, if they are worth keeping until the conversion is finished, because they took long.
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
    options: Mapping[str, Any] = field(default_factory=dict)
    schema: Schema = field(default_factory=Schema)
    has_images: bool = True
    kept_by: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """One annotated object of one image, in fractions of the displayed size, 0 ≤ min ≤ max ≤ 1."""

    key: str
    name: str
    x_min: float
    y_min: float
    x_max: float
    y_max: float


class Source(ABC):
    """A dataset to convert: official archives, an extracted tree, class folders, or an LMDB."""

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits that were found, in the order train, val, test."""

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for the user that describes the source."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders, absolute and without links, in which any new file may become an image."""
        return ()

    @abstractmethod
    def survey(self, split: str) -> Listing:
        """Return every image of a split that can be listed, and the problems of the others.

        Deterministic; reads headers and folder entries, never pixels. Raises DataError if nothing can be
        listed, and OSError if the source cannot be read.
        """

    def listing(self, split: str) -> Listing:
        """Return every image of a split.

        Raises DataError if the source is damaged, contradicts itself, or holds links, devices, duplicate or
        hostile names, with the number of problems and the first of each kind, and OSError.
        """
        listing = self.survey(split)
        listing.problems.raise_all()
        return listing

    def known_by(self, split: str) -> Mapping[str, Any] | None:
        """Return all that decides a split's entries, as a JSON object; None if only a survey tells.

        The entries are in an archive then, and :meth:`survey_of` does without reading its headers.
        Raises what :meth:`survey` raises.
        """
        return None

    def survey_of(self, split: str, entries: Entries) -> Listing:
        """Return the survey of a split, given the entries of an earlier one that was known by the same."""
        return self.survey(split)

    def boxes(self, split: str) -> Iterator[Box] | None:
        """Return the split's annotated boxes, ordered by key and by object; None if it has none."""
        return None


def no_such_split(split: str, splits: tuple[str, ...]) -> UsageError:
    return UsageError(f"the source has no split {split!r}, only {', '.join(splits)}")
