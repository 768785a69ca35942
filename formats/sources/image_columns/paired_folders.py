"""The source of images in folders, with folders of images that belong to them, such as masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardprep.formats.columns.column_choice import ColumnChoice
from shardprep.formats.columns.schema import Field, Schema
from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.listing.entry_table import EntryTable, record_key
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import SPLITS, Entries, Listing, Source, no_such_split
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.tree_files import FolderWalk, FoundFile, is_image
from shardprep.formats.sources.listing.tree_reader import TreeReader

from .image_labels import ImageLabels
from .paired_reader import PairedReader, pair_columns

LAYOUT = "paired-folders"
IMAGES = "images"
IMAGE_LENGTH = "image_length"


@dataclass(frozen=True)
class PairedSplit:
    """The folder of a split's images, and for each column the folder of its images, all absolute."""

    images: Path
    partners: Mapping[str, Path]


def paired_folders(path: Path, split: str | None, options: SourceOptions) -> PairedFolders:
    """Return the source of a folder for the pairs in the options.

    The images of a split lie in ``<split>/images``, ``images/<split>`` or ``<split>``; without splits in
    ``images`` or in the folder itself, which then is ``split`` or train. Raises UsageError for folders that
    are not there.
    """
    choices = options.pair_choices
    top = path / IMAGES if (path / IMAGES).is_dir() else path
    found = {}
    for name in SPLITS:
        of_split = (path / name / IMAGES, top / name)
        images = next((folder for folder in of_split if folder.is_dir()), None)
        if images is not None:
            found[name] = PairedSplit(images, _partners(path, name, choices))
    if not found:
        found[split or "train"] = PairedSplit(top, _partners(path, "", choices))
    return PairedFolders(path, found, options)


def _partners(path: Path, split: str, choices: Sequence[ColumnChoice]) -> dict[str, Path]:
    partners = {}
    for name, _, folder in choices:
        places = (path / split / folder, path / folder / split)
        if Path(folder).is_absolute():
            places = (Path(folder) / split, Path(folder))
        there = next((place for place in places if place.is_dir()), None)
        if there is None:
            raise UsageError(
                f"is no folder, and neither is {str(places[1])!r}; --pair {name}=FOLDER names one relative to "
                "the split or to the source, or absolute",
                path=places[0],
            )
        partners[name] = there
    return partners


@dataclass(frozen=True)
class PairedFolders(Source):
    """Images below folders, each with a partner of the same path but for its extension in every pair."""

    root: Path
    of_split: Mapping[str, PairedSplit]
    source_options: SourceOptions

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.of_split)

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(
            folder.resolve()
            for one in self.of_split.values()
            for folder in (one.images, *one.partners.values())
        )

    @property
    def description(self) -> str:
        return f"{LAYOUT}: {', '.join(self.splits)}, with {', '.join(self.source_options.pairs)}"

    @property
    def schema(self) -> Schema:
        """The columns: one image for each pair."""
        return Schema(Field(choice.name, "image") for choice in self.source_options.pair_choices)

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        labels, of_split, problems, ignored = self._found
        folders, follow = self.of_split[split], self.source_options.follow_symlinks
        partners = tuple(
            TreeReader(folder, follow, pair_columns(number))
            for number, folder in enumerate(folders.partners.values())
        )
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=of_split[split],
            labels=labels,
            reader=PairedReader(
                TreeReader(folders.images, follow, ("path", IMAGE_LENGTH, "mtime_ns")), partners
            ),
            problems=problems,
            ignored=dict(ignored[split]),
            options=self.source_options.kept("follow_symlinks", "pairs"),
            schema=self.schema,
        )

    @cached_property
    def _found(self) -> tuple[LabelSpace, dict[str, Entries], Problems, dict[str, Counter[str]]]:
        problems, numbers = Problems(), ImageLabels()
        matched = {
            split: _Matched(folders, numbers, problems, follow=self.source_options.follow_symlinks)
            for split, folders in self.of_split.items()
        }
        labels, label_of = numbers.numbered()
        for one in matched.values():
            one.entries["label"] = label_of[one.entries["label"]]
        return (
            labels,
            {split: one.entries for split, one in matched.items()},
            problems,
            {split: one.ignored for split, one in matched.items()},
        )


class _Matched:
    """The images of one split with their partners; ``ignored`` counts what was left out of the images."""

    def __init__(
        self, folders: PairedSplit, labels: ImageLabels, problems: Problems, *, follow: bool
    ) -> None:
        self._folders = folders
        self._labels = labels
        self._problems = problems
        self._follow = follow
        self._table = EntryTable(folders.images, problems, _more_columns(len(folders.partners)))
        self.ignored = self._match()
        self.entries = self._table.finish()

    def _match(self) -> Counter[str]:
        waiting = {name: self._by_stem(folder) for name, folder in self._folders.partners.items()}
        walk = FolderWalk(self._folders.images, self._follow, self._problems)
        apart = _inside(self._folders.images, self._folders.partners.values())
        for file in walk.files_below():
            if is_image(file) and not file.path.startswith(apart):
                self._add(file, [files.pop(_stem(file), None) for files in waiting.values()])
        for name, left in waiting.items():
            surplus = f"is the {name} of no image in {self._folders.images}; add that, or remove this"
            for file in left.values():
                path = self._folders.partners[name] / file.path
                self._problems.add(SourceDamaged(surplus, path=path))
        return walk.ignored

    def _by_stem(self, folder: Path) -> dict[str, FoundFile]:
        found: dict[str, FoundFile] = {}
        for file in FolderWalk(folder, self._follow, self._problems).files_below():
            if is_image(file) and found.setdefault(_stem(file), file) is not file:
                twice = "differs from another file by its extension alone; remove one of them"
                self._problems.add(SourceDamaged(twice, path=folder / file.path))
        return found

    def _add(self, file: FoundFile, found: Sequence[FoundFile | None]) -> None:
        for (name, folder), partner in zip(self._folders.partners.items(), found, strict=True):
            if partner is None:
                missing = f"has no {name} in {folder}; add it, or remove this image"
                self._problems.add(SourceDamaged(missing, path=self._folders.images / file.path))
        partners = [partner for partner in found if partner is not None]
        if len(partners) == len(found):
            self._append(file, partners)

    def _append(self, file: FoundFile, partners: Sequence[FoundFile]) -> None:
        self._table.append(
            record_key(file.path.partition("/")[0], file.path),
            self._labels.of_folder(file.path),
            length=file.size + sum(partner.size for partner in partners),
            path=file.path.encode(),
            mtime_ns=file.mtime_ns,
            more=(file.size, *(part for p in partners for part in (p.path.encode(), p.size, p.mtime_ns))),
        )


def _more_columns(partners: int) -> list[tuple[str, str]]:
    columns = [(IMAGE_LENGTH, "<i8")]
    for number in range(partners):
        path, size, time = pair_columns(number)
        columns += [(path, "S1"), (size, "<i8"), (time, "<i8")]
    return columns


def _inside(images: Path, partners: Iterable[Path]) -> tuple[str, ...]:
    """Return the beginnings of paths below ``images`` that are partners."""
    inside = [folder.relative_to(images) for folder in partners if folder.is_relative_to(images)]
    if Path() in inside:
        raise UsageError("holds the images themselves; name another folder with --pair", path=images)
    return tuple(f"{folder.as_posix()}/" for folder in inside)


def _stem(file: FoundFile) -> str:
    return file.path.rpartition(".")[0]
