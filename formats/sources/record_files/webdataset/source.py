"""The source of WebDataset's tar shards, read in place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.record_files.record_source import RecordSource, Scanned
from shardprep.formats.sources.record_files.split_files import SplitFiles, split_files
from shardprep.formats.system.regular_file import ArchiveFile

from .contents import ShardContents
from .reader import SampleReader
from .samples import samples

_SHARD = re.compile(r"(?!ILSVRC2012_|n\d{8}\.tar$).+\.tar", re.DOTALL | re.ASCII)


def webdataset(path: Path, split: str | None, options: SourceOptions) -> WebDataset | None:
    """Return the source of the tars at a path, or in the folder there; None if there are none.

    The first sample has two parts or more, or is damaged: a tar of images alone may be of anything, and its
    folders of classes. Archives of ILSVRC12, and of its classes, are none. Raises UsageError, OSError.
    """
    files = split_files(path, split, _SHARD, follow_symlinks=options.follow_symlinks)
    return WebDataset(files, options) if files and _has_samples(files) else None


def _has_samples(files: SplitFiles) -> bool:
    """Whether the first sample of all shards has two parts, or cannot be read."""
    for name in (name for names in files.of_split.values() for name in names):
        try:
            with ArchiveFile(files.top / name) as archive:
                sample = next(samples(archive), None)
        except SourceDamaged:
            return True  # where the damage is will be said with all other problems
        if sample is not None:
            return len(sample.parts) > 1
    return False


@dataclass(frozen=True)
class WebDataset(RecordSource):
    """Shards of WebDataset; a record's key is its sample's stem.

    The image is the first member with an extension of IMAGE_EXTENSIONS, in their order; ``cls`` is the label,
    and ``classname`` beside it the label's name. Each other extension is a column, and each sample has it.
    """

    LAYOUT: ClassVar[str] = "webdataset"

    def scan(self, split: str) -> Scanned:
        contents = ShardContents(self.files)
        for name in self.files.of_split[split]:
            with contents.problems.collected():
                contents.read(name)
        schema, has_images = contents.columns()
        return Scanned(
            entries=contents.table.finish(may_number=False),
            reader=SampleReader(self.files.top, schema),
            problems=contents.problems,
            classes=contents.classes,
            schema=schema,
            has_images=has_images,
        )
