"""The source of images paired with images in other folders, such as masks."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from posixpath import splitext
from typing import NamedTuple

import numpy as np

from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.records.record import MAX_IMAGE_BYTES, LabelSpace
from shardprep.formats.records.schema import CODECS, BadValue, Field, Schema
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.dataset import SPLITS
from shardprep.formats.sources.listing import Classes, EntryTable, record_key
from shardprep.formats.sources.source import (
    ByteReader,
    Entries,
    Listing,
    Problems,
    ResourceReader,
    Source,
    SourceOptions,
    split_folders,
)
from shardprep.formats.sources.trees import (
    IMAGE_COLUMNS,
    FolderWalk,
    FoundFile,
    TreeReader,
    other_folders_note,
)

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "jpegimages", "rgb")
_IMAGES = re.compile(rf"\b({'|'.join(IMAGE_FOLDERS)}|inputs?|originals?)\b")
_PARTNERS = re.compile(
    r"\b(masks?|labels?|annotations?|segmentations?|segmentation(class|object)|depths?|gts?|ground ?truths?|targets?)\b"
)


def refuse_unpaired(folder: Path, names: Sequence[str]) -> None:
    """Raise UsageError if the folders ``names`` look like images and their annotations instead of classes.

    One has "images" or the like in its name, and others are named like masks, or have files with the same
    names as a folder "images".
    """
    words = {name: re.sub("[^a-z]+", " ", name.lower()) for name in names}
    whole = pick_image_folder(names)
    images = whole or next(
        (n for n in names if _IMAGES.search(words[n]) and not _PARTNERS.search(words[n])), None
    )
    stems = _stems(folder / whole) if whole else set()
    others = [name for name in names if images and name != images]
    if partners := [n for n in others if _PARTNERS.search(words[n]) or _stems(folder / n) == stems != set()]:
        raise UsageError(
            f"holds {images} and {', '.join(partners)}, which are not classes; name folders of masks with --pair "
            "NAME=FOLDER and COCO's annotations with --coco FILE, or write values to metadata.csv beside the images",
            path=folder,
        )


def _stems(folder: Path) -> set[str]:
    """Return the paths below a folder of its files that are not hidden, without extensions."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names if name[0] != ".")
    return {splitext(file.relative_to(folder).as_posix())[0] for file in files}


def pick_image_folder(names: Iterable[str]) -> str | None:
    """Return the folder name that comes first in IMAGE_FOLDERS; None if no name is there."""
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[name] for name in IMAGE_FOLDERS if name in by_lower), None)


class PairedSplit(NamedTuple):
    """The folder of a split's images, and the folder of each column's images, all absolute."""

    images: Path
    partners: Mapping[str, Path]


def recognise_pairs(path: Path, split: str | None, options: SourceOptions) -> PairedFolders:
    """Return the source of a folder with the pairs in the options.

    A split's images are in ``<split>/images``, ``images/<split>`` or ``<split>``; those of a source without
    splits, which is ``split`` or train, in ``images`` or in the folder itself. Raises UsageError for missing
    folders, and for partners of a split without images.
    """
    top = _find_images(path) or path
    outer, inner = split_folders(path), split_folders(top)
    by_split = {}
    for name in SPLITS:
        images = _find_images(path / outer[name]) if name in outer else None
        images = images or (top / inner[name] if name in inner else None)
        if images is not None:
            by_split[name] = PairedSplit(images, _partners(path, name, outer, options))
    for _, _, folder in options.pair_choices if by_split and not split else ():
        if (of_pair := path / user_path(folder)).is_dir() and (
            extra := sorted(split_folders(of_pair).keys() - by_split.keys())
        ):
            raise UsageError(
                f"has {', '.join(extra)}, for which {top} has no images; add them, or move it away",
                path=of_pair,
            )
    if not by_split:
        by_split[split or "train"] = PairedSplit(top, _partners(path, "", {}, options))
    return PairedFolders(path, by_split, options)


def _find_images(folder: Path) -> Path | None:
    name = pick_image_folder(each.name for each in os.scandir(folder) if each.is_dir())
    return folder / name if name else None


def _partners(path: Path, split: str, outer: Mapping[str, str], options: SourceOptions) -> dict[str, Path]:
    partners = {}
    for name, _, origin in options.pair_choices:
        whole = path / user_path(origin)
        inner = split_folders(whole).get(split, split) if split and whole.is_dir() else split
        places = [path / outer.get(split, split) / origin, whole / inner]
        if user_path(origin).is_absolute():
            places = [whole / inner, whole]
        folder = next((place for place in places if place.is_dir()), None)
        if folder is None:
            tried = " or ".join(dict.fromkeys(map(str, places)))
            advice = f"give --pair {name}=FOLDER relative to the split or to the source, or absolute"
            raise UsageError(f"there is no folder {tried}; {advice}")
        partners[name] = folder
    return partners


@dataclass(frozen=True)
class PairedFolders(Source):
    """Images below folders, each with a partner in every pair whose path differs only in its extension."""

    LAYOUT = "paired-folders"
    OPTIONS = ("pairs",)

    root: Path
    by_split: Mapping[str, PairedSplit]
    source_options: SourceOptions

    @property
    def folders(self) -> tuple[Path, ...]:
        paired = ((each.images, *each.partners.values()) for each in self.by_split.values())
        return tuple(folder.resolve() for folders in paired for folder in folders)

    @property
    def description(self) -> str:
        return f"{super().description}, with {', '.join(self.source_options.pairs)}"

    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        labels, problems, by_split = self._listed_splits
        folders, follow = self.by_split[split], self.source_options.follow_symlinks
        tops = dict.fromkeys(top for top in (self.root, folders.images.parent) if top != self.root.parent)
        entries, ignored = by_split[split]
        readers = [TreeReader(folders.images, follow, IMAGE_COLUMNS)]
        for number, folder in enumerate(folders.partners.values()):
            readers.append(TreeReader(folder, follow, pair_columns(number)))
        return Listing(
            split,
            self.LAYOUT,
            entries,
            labels,
            PairedReader(tuple(readers)),
            problems=problems,
            ignored=dict(ignored),
            notes=tuple(note for top in tops for note in other_folders_note(top, self.folders)),
            options=self.source_options.kept("follow_symlinks", "pairs"),
            schema=Schema(Field(choice.name, "image") for choice in self.source_options.pair_choices),
        )

    @cached_property
    def _listed_splits(self) -> tuple[LabelSpace, Problems, dict[str, tuple[Entries, Counter[str]]]]:
        """The classes, the problems, and each split's entries and counts of ignored files."""
        problems, classes, by_split = Problems(), Classes(), {}
        for split, folders in self.by_split.items():
            walk = FolderWalk(folders.images, self.source_options.follow_symlinks, problems)
            by_split[split] = _pair_images(folders, walk, classes), walk.ignored
        labels, label_of = classes.assign_labels()
        for entries, _ in by_split.values():
            entries["label"] = label_of[entries["label"]]
        return labels, problems, by_split


def _pair_images(folders: PairedSplit, walk: FolderWalk, classes: Classes) -> Entries:
    """Return the images of one split with their partners, and add problems to those of the walk."""
    top, resolved = folders.images.resolve(), [folder.resolve() for folder in folders.partners.values()]
    inside = tuple(
        f"{folder.relative_to(top).as_posix()}/" for folder in resolved if folder.is_relative_to(top)
    )
    if "./" in inside:
        raise UsageError("holds the images themselves; name another folder with --pair", path=folders.images)
    images = _files_by_stem(walk, inside)
    partners = {name: _files_by_stem(replace(walk, top=folder)) for name, folder in folders.partners.items()}
    columns = [("image_length", "<i8")]
    for number in range(len(partners)):
        columns += zip(pair_columns(number), ("S1", "<i8", "<i8"), strict=True)
    table = EntryTable(folders.images, walk.problems, columns)
    for stem, file in images.items():
        matches = [files[stem] for files in partners.values() if stem in files]
        if len(matches) == len(partners):
            table.append(
                record_key(file.path.partition("/")[0], file.path),
                classes.add_folder(file.path),
                length=file.size + sum(match.size for match in matches),
                file=file,
                extra=(file.size, *(part for p in matches for part in (p.path.encode(), p.size, p.mtime_ns))),
            )
    for name, files in partners.items():
        folder = folders.partners[name]
        lacking = f"has no {name} in {folder}; add it, or remove this image"
        for file in (images[stem] for stem in images if stem not in files):
            walk.problems.add(SourceDamaged(lacking, path=folders.images / file.path))
        unmatched = (
            f"is the {name} of an image that is not in {folders.images}; add the image, or remove this file"
        )
        for file in (files[stem] for stem in files if stem not in images):
            walk.problems.add(SourceDamaged(unmatched, path=folder / file.path))
    return table.finish()


def _files_by_stem(walk: FolderWalk, skipped: tuple[str, ...] = ()) -> dict[str, FoundFile]:
    """Return the images below a folder by path without extension, except those in the ``skipped`` folders."""
    by_stem: dict[str, FoundFile] = {}
    for file in walk.files_below():
        if file.path.startswith(skipped) or walk.skip_non_image(file):
            continue
        if (first := by_stem.setdefault(splitext(file.path)[0], file)) is not file:
            twice = f"differs from {first.path} only in its extension; remove one of them"
            walk.problems.add(SourceDamaged(twice, path=walk.top / file.path), "twice")
        elif file.size > MAX_IMAGE_BYTES:
            large = f"has {file.size} bytes, but an image has at most {MAX_IMAGE_BYTES}; remove it"
            walk.problems.add(SourceDamaged(large, path=walk.top / file.path), "too large")
    return by_stem


def pair_columns(number: int) -> tuple[str, str, str]:
    """Return the names of the entry columns with a partner's path, size and mtime."""
    return f"path_{number}", f"length_{number}", f"mtime_ns_{number}"


@dataclass
class PairedReader(ResourceReader[tuple[ByteReader, ...]]):
    """Reader of images below the first of the ``folders``, and of their partners in the others."""

    folders: tuple[TreeReader, ...]

    @contextmanager
    def open_resource(self) -> Iterator[tuple[ByteReader, ...]]:
        with ExitStack() as stack:
            yield tuple(stack.enter_context(folder.open()) for folder in self.folders)

    def read(self, entry: np.void) -> bytes:
        return self.resource[0].read(entry)

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        images = []
        for partner in self.resource[1:]:
            try:
                images.append(CODECS["image"].encode(partner.read(entry)))
            except BadValue as error:
                raise BadValue(f"{partner.location_of(entry)}: {error.message}") from error
        return tuple(images)

    def location_of(self, entry: np.void) -> str:
        return self.folders[0].location_of(entry)
