"""Where images come from: what a source, a listing of it and a reader of its bytes promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .labels import LabelSpace

SPLITS = ("train", "val", "test")
MAX_IMAGE_BYTES = 64 << 20  # one ILSVRC12 image is 110 KB on average, the largest is about 15 MB

Entries = npt.NDArray[np.void]


def entry_dtype(key_bytes: int, path_bytes: int) -> np.dtype[np.void]:
    """The columns of a listing: a record's key and label, and where its bytes are.

    ``path`` is relative to the source and empty in an archive; ``offset`` is 0 outside of one.
    ``mtime_ns`` is the file's, 0 in an archive: it tells a changed source from the one planned.
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


class ByteReader(AbstractContextManager["ByteReader"]):
    """Reads an entry's bytes. Picklable while closed; entering opens it for this process.

    Not thread-safe. Leaving raises SourceDamaged where the source changed meanwhile.
    """

    @abstractmethod
    def read(self, entry: np.void) -> bytes:
        """All bytes of the entry. Raises SourceDamaged when they are not there any more."""

    @abstractmethod
    def where(self, entry: np.void) -> str:
        """The entry's place for people: a path, or an archive and a byte offset."""


@dataclass(frozen=True)
class Archive:
    """A file of the source: its name, never a path; md5 and verified say what was checked of it."""

    name: str
    size: int
    mtime_ns: int
    md5: str | None = None
    verified: str = "no"

    def to_json(self) -> dict[str, Any]:
        """What the manifest keeps of it: nothing that depends on when it was read, or how carefully."""
        return {"name": self.name, "size": self.size}


@dataclass(frozen=True)
class Listing:
    """One split of a source: every image, none of them read.

    ``entries`` (dtype of :func:`entry_dtype`) are in no promised order and have unique keys;
    ``expected`` is the number of images that there should be, None where nobody says.
    """

    split: str
    layout: str
    entries: Entries
    labels: LabelSpace
    reader: ByteReader
    archives: tuple[Archive, ...] = ()
    expected: int | None = None
    shortfall: str = ""


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
    """A dataset as its owner has it: official archives, an extracted tree, class folders, an LMDB."""

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits that were found, in the order train, val, test."""

    @property
    @abstractmethod
    def description(self) -> str:
        """One line that says what was recognised, for the user."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders, absolute and without links, in which any new file may become an image."""
        return ()

    @abstractmethod
    def listing(self, split: str) -> Listing:
        """Every image of a split. Deterministic; reads headers and folder entries, never pixels.

        Raises DataError where the source is damaged, disagrees with itself, or holds links,
        devices, duplicate or hostile names; OSError where it cannot be read.
        """

    def boxes(self, split: str) -> Iterator[Box] | None:
        """The split's annotated boxes, ordered by key and by object; None where none are given."""
        return None
