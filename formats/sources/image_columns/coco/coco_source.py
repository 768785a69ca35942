"""The source of images with COCO's annotations: boxes, categories and segmentations of instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.listing.archive_md5 import archive_of
from shardprep.formats.sources.listing.source import SPLITS, Listing, Source, no_such_split
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.tree_reader import TreeReader

from .coco_reader import IMAGE_LENGTH, CocoReader, coco_schema
from .instances import CocoInstances

LAYOUT = "coco"
ANNOTATIONS, PREFIX = "annotations", "instances_"


@dataclass(frozen=True)
class CocoSplit:
    """The file of a split's instances, and the folder of its images."""

    instances: Path
    images: Path


def coco_folder(path: Path, split: str | None, options: SourceOptions) -> CocoFolder | None:
    """Return the source of a folder with COCO's instances, None without any.

    These are the file of the option ``coco``, or ``annotations/instances_<name>.json`` with the images in the
    folder ``<name>``. Raises UsageError for a file that is not there, and for two of one split.
    """
    if options.coco is not None:
        instances = path / options.coco
        if not instances.is_file():
            raise UsageError("is no file; --coco names the instances relative to the source", path=instances)
        images = path / _name_of(instances)
        found = CocoSplit(instances.resolve(), images if images.is_dir() else path)
        return CocoFolder(path, {split or _split_of(_name_of(instances)): found}, options)
    of_split: dict[str, CocoSplit] = {}
    for instances in sorted((path / ANNOTATIONS).glob(f"{PREFIX}*.json")):
        images, name = path / _name_of(instances), _split_of(_name_of(instances))
        if not images.is_dir():
            continue
        if name in of_split:
            raise UsageError(f"is a second file of the split {name}; choose one with --coco", path=instances)
        of_split[name] = CocoSplit(instances, images)
    return CocoFolder(path, of_split, options) if of_split else None


def _name_of(instances: Path) -> str:
    return instances.stem.removeprefix(PREFIX)


def _split_of(name: str) -> str:
    return next((split for split in SPLITS if name.lower().startswith(split)), "train")


@dataclass(frozen=True)
class CocoFolder(Source):
    """Images in folders, and COCO's instances of each split. Images have no label of their own."""

    root: Path
    of_split: Mapping[str, CocoSplit]
    source_options: SourceOptions

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in self.of_split)

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(one.images.resolve() for one in self.of_split.values())

    @property
    def description(self) -> str:
        return f"{LAYOUT}: {', '.join(self.splits)}"

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        one, options = self.of_split[split], self.source_options
        found = CocoInstances(one.instances, one.images, follow_symlinks=options.follow_symlinks)
        ignored = found.read()
        images = TreeReader(one.images, options.follow_symlinks, ("path", IMAGE_LENGTH, "mtime_ns"))
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=found.entries,
            labels=LabelSpace.of(()),
            reader=CocoReader(images, one.instances, found.identity, tuple(found.categories), found.places),
            archives=(archive_of(one.instances),),
            problems=found.problems,
            ignored=dict(ignored),
            options=options.kept("follow_symlinks", "coco"),
            schema=coco_schema(found.categories.values()),
        )
