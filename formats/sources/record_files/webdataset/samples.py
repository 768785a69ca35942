"""The samples of a shard: its members in a row with one stem."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.image_names import IMAGE_SUFFIXES
from shardprep.formats.sources.tar.header import BLOCK
from shardprep.formats.sources.tar.walk import Member, walk
from shardprep.formats.system.regular_file import ArchiveFile

IMAGE_EXTENSIONS = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
MAX_PARTS = 256

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)


class ShardSample(NamedTuple):
    """A sample: its stem, the offset of its first header, and its members by extension in lower case."""

    stem: str
    start: int
    parts: dict[str, Member]

    @property
    def image(self) -> str | None:
        """The extension of its image: the first of IMAGE_EXTENSIONS that it has, None for none."""
        return next((extension for extension in IMAGE_EXTENSIONS if extension in self.parts), None)

    @property
    def length(self) -> int:
        """The bytes of all members."""
        return sum(member.size for member in self.parts.values())


def samples(archive: ArchiveFile, start: int = 0) -> Iterator[ShardSample]:
    """Yield the samples from the header at ``start`` on, in the order of the shard.

    Raises SourceDamaged like :func:`~shardprep.formats.sources.tar.walk.walk`, and for a member without an
    extension, or with one that its sample has already.
    """
    sample = None
    for member in walk(archive.read_at, archive=str(archive.path), end=archive.end, start=start):
        stem, extension = _split(member, archive)
        if sample is None or stem != sample.stem:
            if sample is not None:
                yield sample
            sample = ShardSample(stem, start, {})
        if extension in sample.parts or len(sample.parts) == MAX_PARTS:
            raise _damaged(member, archive, f"is one more member .{extension[:80]} of its sample; remove it")
        sample.parts[extension] = member
        start = member.offset + -(-member.size // BLOCK) * BLOCK
    if sample is not None:
        yield sample


def _split(member: Member, archive: ArchiveFile) -> tuple[str, str]:
    match = _NAME.fullmatch(member.name)
    if match is None:
        raise _damaged(member, archive, "has no extension that says what it is; remove it")
    return match[1], match[2].lower()


def _damaged(member: Member, archive: ArchiveFile, reason: str) -> SourceDamaged:
    return SourceDamaged(reason, path=f"{archive.path}, byte {member.offset}", key=member.name)
