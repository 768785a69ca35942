"""The contents of a split's shards, as they are read header by header."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from shardprep.formats.columns.schema import MAX_COLUMNS, Field, Schema
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.tree_files import wrapped
from shardprep.formats.sources.record_files.classes import NumberedClasses
from shardprep.formats.sources.record_files.column_fields import column_name
from shardprep.formats.sources.record_files.record_table import RecordTable
from shardprep.formats.sources.record_files.split_files import SplitFiles
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile

from .samples import IMAGE_EXTENSIONS, ShardSample, samples

LABEL, CLASS_NAME = "cls", "classname"
MAX_SMALL = 4096  # bytes of a label or of a class's name

_NUMBER = re.compile(r"\s*(-1|[0-9]{1,9})\s*", re.ASCII)
_KINDS = {"txt": "text", "json": "json"}


class _Place(NamedTuple):
    """Where a sample with certain parts is first, and how many have them."""

    path: str
    key: str
    samples: int


class ShardContents:
    """The samples so far, and the sets of parts that they have."""

    def __init__(self, files: SplitFiles) -> None:
        self.problems = Problems()
        self.table = RecordTable(files.top, self.problems)
        self.classes = NumberedClasses()
        self._files = files
        self._first_of: dict[tuple[bool, frozenset[str]], _Place] = {}
        self._parts: set[str] = set()

    def read(self, name: str) -> None:
        """Read the headers and labels of a shard. Raises SourceDamaged where no more of it can be read."""
        with ArchiveFile(self._files.top / name) as archive:
            archive.expect_random_reads()
            for sample in samples(archive):
                with self.problems.collected("label"):
                    self._add(sample, name, archive)

    def _add(self, sample: ShardSample, name: str, archive: ArchiveFile) -> None:
        place = f"{archive.path}, byte {sample.start}"
        with foreign_file(place, "correct the shard", key=sample.stem):
            label = self._label(sample, archive)
        self.table.append(
            sample.stem,
            label,
            length=sample.length,
            path=name,
            offset=sample.start,
            mtime_ns=wrapped(archive.identity.mtime_ns),
        )
        self._count(sample, place)

    def _label(self, sample: ShardSample, archive: ArchiveFile) -> int:
        number = _small(sample, LABEL, archive)
        if number is None:
            return UNLABELLED
        match = _NUMBER.fullmatch(number)
        if match is None:
            raise ValueError(f"its .{LABEL} has {number[:80]!r}, and not the number of its class")
        return self.classes.add(int(match[1]), _small(sample, CLASS_NAME, archive))

    def _count(self, sample: ShardSample, place: str) -> None:
        image = sample.image
        parts = frozenset(part for part in sample.parts if part != image)
        first = self._first_of.get((image is not None, parts), _Place(place, sample.stem, 0))
        self._first_of[image is not None, parts] = first._replace(samples=first.samples + 1)
        self._parts |= parts
        if len(self._parts) > MAX_COLUMNS:
            raise SourceDamaged(f"has one more part than the {MAX_COLUMNS} that are possible", path=place)

    def columns(self) -> tuple[Schema, bool]:
        """Return the columns, and whether records have images; a sample that lacks a part is a problem."""
        has_images = any(image for image, _ in self._first_of)
        for (image, parts), place in self._first_of.items():
            missing = [f".{part}" for part in sorted(self._parts - parts)]
            missing += ["an image"] if has_images and not image else []
            if missing:
                self._add_lack(missing, place)
        no_column = {LABEL, CLASS_NAME} if LABEL in self._parts else set()
        return Schema(_fields(self._parts - no_column)), has_images

    def _add_lack(self, missing: list[str], place: _Place) -> None:
        others = f", as {place.samples - 1:,} more samples do" if place.samples > 1 else ""
        lacks = f"lacks {', '.join(missing[:8])}, which other samples have{others}; add what is missing"
        self.problems.add(SourceDamaged(lacks, path=place.path, key=place.key))


def _fields(extensions: set[str]) -> Iterator[Field]:
    for extension in sorted(extensions):
        last = extension.rpartition(".")[2]  # as WebDataset's own decoders
        kind = "image" if last in IMAGE_EXTENSIONS else _KINDS.get(last, "bytes")
        yield Field(column_name(extension), kind)


def _small(sample: ShardSample, part: str, archive: ArchiveFile) -> str | None:
    """Return the text of a small member, None if it is not there. Raises ValueError."""
    member = sample.parts.get(part)
    if member is None:
        return None
    if member.size > MAX_SMALL:
        raise ValueError(f"its .{part} has {member.size} bytes, more than {MAX_SMALL}")
    return archive.read_at(member.size, member.offset).decode()
