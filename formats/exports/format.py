"""The contract of an export format, and the names and records passed to it.

File names are made from keys and classes: safe, unique and reversible. Unsafe characters are quoted as in a
URL, such as ``%2E`` for a dot; ``urllib.parse.unquote`` restores the key.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import UsageError
from shardprep.formats.images.header import kind_of
from shardprep.formats.records.record import LabelSpace
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import hash_file, open_for_publishing
from shardprep.formats.shards.columns import SIDES
from shardprep.formats.shards.read import FileEntry, Rows

CHUNK_ROWS = 10_000


class ExportRecord(NamedTuple):
    """A record to export; ``name`` is the one that the format gives it, and ``row`` its row of the index.

    ``boxes`` are its rows of the table of boxes, None if the dataset has no table; ``columns`` are the
    decoded values by name. ``image`` is empty in a dataset without images.
    """

    name: str
    key: str
    label: int
    image: bytes
    row: np.void
    boxes: Rows | None
    columns: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return kind_of(int(self.row["flags"]))


def corners(boxes: Rows) -> list[list[float]]:
    """Return x_min, y_min, x_max, y_max of each box, as fractions of the image's width and height."""
    return [[float(box[side]) for side in SIDES] for box in boxes]


def real_array(value: Any) -> npt.NDArray[Any]:
    """Return a value as an array; complex numbers become a last dimension of 2."""
    array = np.asarray(value)
    return np.stack([array.real, array.imag], axis=-1) if array.dtype.kind == "c" else array


@dataclass(frozen=True)
class ExportSource:
    """A dataset's description, known before its records are read.

    ``has_labels`` is whether any record has a label, ``has_boxes`` whether there is a table of boxes.
    """

    path: Path
    root: str
    split: str
    labels: LabelSpace
    schema: Schema
    has_images: bool
    has_labels: bool
    has_boxes: bool


class JobFolders(NamedTuple):
    """A job's folders: ``output``, ``work`` in it for state, and ``run`` in that for unfinished files."""

    output: Path
    work: Path
    run: Path


class ExportFormat:
    """The export of a dataset to one format. Picklable and small: it is part of every job.

    The dataset is exported in units, ranges of its records, which are built independently and in any
    order. Equal records give equal bytes. ``writer`` names everything else that determines the bytes. The
    constructor raises UsageError for a dataset that the format cannot hold, and names the column.
    ``report_done`` gets the number of records whose names it has compared.
    """

    name: ClassVar[str]
    unit_names: ClassVar[str]
    """Template of a unit's name, of the dataset's ``split``, the unit's ``number`` and their ``count``."""
    box_names: ClassVar[tuple[str, ...]] = ()
    """The names of boxes in the format; no column of a dataset with boxes may have them."""
    writer: str = "1"
    overhead: int = 0
    """Bytes that the format adds to each record, as far as that is known before."""
    note: str = ""
    """What a user should know about the order of labels in this export; empty for nothing."""
    has_parts: bool = False
    """Whether units leave files in the work folder for :meth:`finish`."""

    def __init__(self, source: ExportSource, index: Rows, report_done: Callable[[int], None]) -> None:
        self.source = source
        for field in source.schema if source.has_boxes else ():
            if field.name.lower() in self.box_names:
                raise self.cannot_hold(field, "boxes use that name", "another format")

    def cannot_hold(self, field: Field, why: str, instead: str = "webdataset, parquet or mds") -> UsageError:
        column = f"the column {field.name} of kind {field.kind}"
        return UsageError(f"{column} cannot be exported to {self.name}: {why}; export to {instead}")

    def unit_name(self, number: int, count: int) -> str:
        return self.unit_names.format(split=self.source.split, number=number, count=count)

    def names(self, rows: Rows) -> list[str]:
        """Return the names that the format gives to records, from their rows of the index."""
        return [key.decode() for key in rows["key"].tolist()]

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        """Write a unit of ``count`` records; not called if a unit is no file. Raises UsageError, OSError."""
        raise NotImplementedError

    def build(self, name: str, records: Iterable[ExportRecord], count: int, folders: JobFolders) -> FileEntry:
        """Write and publish a unit of ``count`` records. Raises the errors of :meth:`write`."""
        return publish_file(name, count, folders, lambda file: self.write(file, records, count))

    def is_intact(self, unit: FileEntry, names: Sequence[str], output: Path) -> bool:
        """Whether a published unit is undamaged. Raises OSError."""
        return unit.is_in(output)

    def finish(self, units: Sequence[FileEntry], folders: JobFolders) -> list[FileEntry]:
        """Publish the files that describe all units, and return their entries."""
        return []


def publish_file(
    name: str, records: int, folders: JobFolders, write: Callable[[BinaryIO], object]
) -> FileEntry:
    """Publish a file written by ``write``, and return its entry. Raises OSError."""
    final = folders.output / name
    with open_for_publishing(final, folders.run) as file:
        write(file)
    return FileEntry(name, final.stat().st_size, hash_file(final), records)


SUFFIXES = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif"),
    "PNG": ("png",),
    "WebP": ("webp",),
    "TIFF": ("tif", "tiff"),
    "BMP": ("bmp", "dib"),
    "GIF": ("gif",),
    "JPEG 2000": ("jp2", "j2k", "jpf", "jpx", "j2c"),
    "Netpbm": ("ppm", "pgm", "pbm", "pnm", "pam", "pfm"),
    "AVIF": ("avif",),
    "Sun raster": ("ras", "sr"),
}
"""The suffixes of each kind of image; the first one is written."""
ALL_SUFFIXES = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)


def split_key(key: str) -> list[str]:
    """Split a key at its slashes, except those that would make an empty part."""
    return re.split(r"(?<!^)(?<!/)/(?!$)", key) if "/" in key else [key]


def encode_stem(key: str) -> str:
    """Return the key as a WebDataset stem: ASCII, without a dot.

    >>> encode_stem("a/b.c"), encode_stem("../x y")
    ('a/b%2Ec', '%2E%2E/x%20y')
    """
    return "/".join(quote(part, safe="").replace(".", "%2E") for part in split_key(key))


def strip_suffix(key: str) -> str:
    """Return the key without an image file's suffix.

    >>> strip_suffix("a/b.JPEG"), strip_suffix("a/b.c")
    ('a/b', 'a/b.c')
    """
    stem, _, suffix = key.rpartition(".")
    return stem if stem and not stem.endswith("/") and suffix.lower() in ALL_SUFFIXES else key


def suffix_of(kind: str, components: int) -> str:
    return "pgm" if kind == "Netpbm" and components == 1 else SUFFIXES[kind][0]


def in_chunks(index: Rows, report_done: Callable[[int], None]) -> Iterator[Rows]:
    """Yield the rows in chunks, and pass to ``report_done`` how many of them are done."""
    for first in range(0, len(index), CHUNK_ROWS):
        yield (rows := index[first : first + CHUNK_ROWS])
        report_done(first + len(rows))


def digest_names(names: Iterable[str]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit digest of each name; equal for names that are equal on some file system."""
    folded = (unicodedata.normalize("NFC", name.casefold()).encode() for name in names)
    return np.frombuffer(b"".join(blake3(name).digest(8) for name in folded), "<u8")


def find_repeated(numbers: npt.NDArray[np.uint64]) -> frozenset[int]:
    values, counts = np.unique(numbers, return_counts=True)
    return frozenset(values[counts > 1].tolist())
