"""The source of WebDataset's tar shards, read in place."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.schema import MAX_COLUMNS, Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, errors_as_damage
from shardprep.formats.sources.listing import Classes
from shardprep.formats.sources.record_files import (
    HEAD_BYTES,
    FilesReader,
    RecordContents,
    RecordSource,
    column_name,
    find_split_files,
    guess_image,
    guess_label,
    name_source_in_errors,
    resolve_name,
)
from shardprep.formats.sources.source import IMAGE_SUFFIXES, SourceOptions
from shardprep.formats.sources.tar import BLOCK, Member, walk_tar

IMAGE_EXTENSIONS = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
LABEL, CLASS_NAME = "cls", "classname"
MAX_SMALL = 4096  # bytes of a label or a class name
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_SHARD = re.compile(r"(?!ILSVRC2012_|n\d{8}\.tar$).+\.tar", re.DOTALL | re.ASCII)
_NUMBER = re.compile(r"\s*(-1|[0-9]{1,9})\s*", re.ASCII)
_MACOS_NAMES = ("._", ".DS_Store")  # names of metadata that its tar adds to each file and folder
_KINDS = {"txt": "text", "json": "json"}
_NON_FINITE = (b"NaN", b"Infinity", b"-Infinity")  # floats as Python writes them into a ``.json``


@dataclass(frozen=True)
class SampleLayout:
    """The extensions of image and label, "" for none; an image of None is the first of IMAGE_EXTENSIONS."""

    image: str | None = None
    label: str = LABEL

    def image_of(self, sample: ShardSample) -> str | None:
        """Return the extension of a sample's image, None without one."""
        extensions = IMAGE_EXTENSIONS if self.image is None else (self.image,)
        return next((extension for extension in extensions if extension in sample.parts), None)

    def non_columns(self, parts: Collection[str]) -> set[str]:
        """Return the parts beside the image that are not columns: the label, and its name beside it."""
        return {self.label, CLASS_NAME} if self.label == LABEL in parts else {self.label}


def recognise_webdataset(
    path: Path, split: str | None, options: SourceOptions, *, single: Collection[str] = ()
) -> WebDataset | None:
    """Return the source of a shard or a folder of them, else None. Raises UsageError, OSError.

    The first sample must have two or more parts, one with an extension in ``single``, or be damaged, unless
    ``options`` name the image's: a tar of images alone may be anything, such as class folders. Archives of
    ILSVRC12 and its classes are not shards.
    """
    files = find_split_files(path, split, _SHARD, follow_symlinks=options.follow_symlinks)
    if files is None:
        return None
    for name in (name for names in files.by_split.values() for name in names):
        try:
            with name_source_in_errors(path), ArchiveFile(files.top / name) as archive:
                sample = next(read_samples(archive), None)
                if sample is not None:
                    last = {part.rpartition(".")[2] for part in sample.parts}
                    if len(sample.parts) < 2 and last.isdisjoint(single) and options.image_column is None:
                        return None
                    return WebDataset(files, options, _detect_layout(sample, archive, options))
        except SourceDamaged:
            return WebDataset(files, options, SampleLayout())  # the damage is reported later
    return None


def _detect_layout(sample: ShardSample, archive: ArchiveFile, options: SourceOptions) -> SampleLayout:
    """Find the image and the label among the parts of the first sample. Raises UsageError."""

    def read_image_head(name: str) -> bytes:
        return archive.read_at(HEAD_BYTES, sample.parts[images[name]].offset)

    def read_label(name: str) -> int | None:
        try:
            match = _NUMBER.fullmatch(read_text(sample, labels[name], archive) or "")
        except ValueError:
            return None
        return int(match[1]) if match else None

    images = {_stem(part, IMAGE_EXTENSIONS): part for part in reversed(sample.parts)}
    labels = {_stem(part, ("txt",)): part for part in reversed(sample.parts)}
    image, label = None, LABEL
    if options.image_column is not None:
        image = resolve_name(sample.parts, options.image_column.lower().removeprefix("."), "--image-column")
    elif SampleLayout().image_of(sample) is None and (guess := guess_image(images, read_image_head)):
        image = images[guess]
    if options.label_column is not None:
        label = resolve_name(sample.parts, options.label_column.lower().removeprefix("."), "--label-column")
    elif LABEL not in sample.parts and (guess := guess_label(labels, read_label)):
        label = labels[guess]
    return SampleLayout(image, label)


def _stem(part: str, extensions: Collection[str]) -> str:
    """Return ``image`` for ``image.png``."""
    stem, _, last = part.rpartition(".")
    return stem if stem and last in extensions else part


class ShardSample(NamedTuple):
    """A sample: its stem, the offset of its first header, and its members by lower-case extension."""

    stem: str
    start: int
    parts: dict[str, Member]

    @property
    def length(self) -> int:
        return sum(member.size for member in self.parts.values())


def read_samples(archive: ArchiveFile, start: int = 0) -> Iterator[ShardSample]:
    """Yield the samples from the header at ``start`` on, without the metadata of macOS.

    Raises SourceDamaged like :func:`.tar.walk_tar`, and for a member whose extension is missing or repeated.
    """
    sample = None
    for member in walk_tar(archive.read_at, archive=str(archive.path), end=archive.end, start=start):
        begin, start = start, member.offset + -(-member.size // BLOCK) * BLOCK
        if member.name.rpartition("/")[2].startswith(_MACOS_NAMES):
            continue
        match = _NAME.fullmatch(member.name)
        if match is None:
            raise _damage(member, archive, "has no extension, so its kind is unknown; remove it")
        stem, extension = match[1], match[2].lower()
        if sample is None or stem != sample.stem:
            if sample is not None:
                yield sample
            sample = ShardSample(stem, begin, {})
        if extension in sample.parts:
            raise _damage(member, archive, f"is a second member .{extension[:80]} of its sample; remove it")
        sample.parts[extension] = member
    if sample is not None:
        yield sample


def _damage(member: Member, archive: ArchiveFile, reason: str) -> SourceDamaged:
    return SourceDamaged(reason, path=f"{archive.path}, byte {member.offset}", key=member.name)


def read_member(archive: ArchiveFile, member: Member) -> bytes:
    return archive.read_at(member.size, member.offset)


def read_text(sample: ShardSample, part: str, archive: ArchiveFile) -> str | None:
    """Return the text of a small member, None if it is missing. Raises ValueError."""
    member = sample.parts.get(part)
    if member is None:
        return None
    if member.size > MAX_SMALL:
        raise ValueError(f"its .{part} has {member.size} bytes, more than {MAX_SMALL}")
    return read_member(archive, member).decode()


OpenSample = tuple[ArchiveFile, ShardSample, Mapping[str, Member]]
"""A sample in its open file, and its members by column name."""


class SampleReader(FilesReader):
    """Reader of the samples in tars; an entry's offset is that of the sample's first header."""

    def read(self, entry: np.void) -> bytes:
        archive, sample, _ = self.record(entry)
        image = self.layout.image_of(sample)
        return b"" if image is None else read_member(archive, sample.parts[image])

    def read_record(self, file: ArchiveFile, entry: np.void) -> OpenSample:
        sample = next(read_samples(file, int(entry["offset"])), None)
        if sample is None or sample.length != entry["length"]:
            raise self.changed_error(entry)
        columns = sample.parts.keys() - {self.layout.image_of(sample), *self.layout.non_columns(sample.parts)}
        return file, sample, {column_name(part): sample.parts[part] for part in columns}

    def value(self, column: Field, record: OpenSample, entry: np.void) -> Any:
        archive, _, members = record
        data = read_member(archive, members[column.name])
        return json.loads(data.decode()) if column.kind == "float" else column.codec.decode(data)


class ShardContents(RecordContents):
    READER = SampleReader
    can_number_keys = False

    def __init__(self, source: RecordSource, classes: Classes) -> None:
        super().__init__(source, classes)
        self._first_samples: dict[tuple[bool, frozenset[str]], tuple[str, str]] = {}
        self._parts: set[str] = set()
        self._floats: set[str] = set()

    def read(self, file: ArchiveFile) -> None:
        for sample in read_samples(file):
            place = f"{file.path}, byte {sample.start}"
            with self.problems.collect("label"):
                with errors_as_damage(place, "correct the shard", key=sample.stem):
                    label = self._label(sample, file)
                self.append(sample.stem, label, length=sample.length, offset=sample.start)
                image = self.layout.image_of(sample)
                parts = frozenset(sample.parts.keys() - {image})
                self._first_samples.setdefault((image is not None, parts), (place, sample.stem))
                self._parts |= parts
                for part in (part for part in parts if part.rpartition(".")[2] == "json"):
                    member = sample.parts[part]  # read only if it may be a float that JSON lacks
                    if member.size in map(len, _NON_FINITE) and read_member(file, member) in _NON_FINITE:
                        self._floats.add(part)
            if len(self._parts) > MAX_COLUMNS:
                raise SourceDamaged(f"has more than {MAX_COLUMNS} kinds of parts", path=place)

    def _label(self, sample: ShardSample, archive: ArchiveFile) -> int:
        text = read_text(sample, self.layout.label, archive)
        match = _NUMBER.fullmatch(text or "")
        if match is None:
            return self.label_of(text and text.strip())
        name = read_text(sample, CLASS_NAME, archive) if self.layout.label == LABEL else None
        return self.classes.add_number(int(match[1]), name)

    def columns(self) -> tuple[Schema, bool]:
        """Return the columns, and whether there are images; samples that lack a part are problems."""
        has_images = any(image for image, _ in self._first_samples)
        others = self.layout.non_columns(self._parts)
        needed = {part for part in self._parts if part in others or self.takes(column_name(part))}
        for (image, parts), (place, stem) in self._first_samples.items():
            missing = [f".{part}" for part in sorted(needed - parts)]
            missing += ["an image"] if has_images and not image else []
            if missing:
                lacks = f"lacks {', '.join(missing[:8])}, which other samples have; add it to every sample"
                self.problems.add(SourceDamaged(lacks, path=place, key=stem))
        fields = []
        for part in sorted(needed - others):
            last = part.rpartition(".")[2]  # like WebDataset's own decoders
            kind = "image" if last in IMAGE_EXTENSIONS else _KINDS.get(last, "bytes")
            kind = "float" if part in self._floats else kind
            fields.append(Field(column_name(part), kind))
        return Schema(fields), has_images


@dataclass(frozen=True)
class WebDataset(RecordSource):
    """Shards of WebDataset; a record's key is its sample's stem.

    The image is the member with the first of IMAGE_EXTENSIONS; ``cls`` is the label, and ``classname`` beside
    it the class name. Every other extension is a column that all samples have; ``json`` is a column of floats
    if a value is NaN or infinite.
    """

    LAYOUT = "webdataset"
    CONTENTS = ShardContents
