"""Sources of images in folders: an extracted ILSVRC12, Kaggle's tree, and any folder of class folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from shardprep.formats.errors import LabelConflict, SourceDamaged, UsageError
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.runtime.files import foreign_file
from shardprep.formats.sources.annotations import AnnotationFiles
from shardprep.formats.sources.ilsvrc import IlsvrcSource
from shardprep.formats.sources.listing import EntryTable, record_key
from shardprep.formats.sources.pairs import refuse_unpaired
from shardprep.formats.sources.source import SPLITS, Entries, Listing, Problems, SourceOptions, split_folders
from shardprep.formats.sources.trees import (
    FolderWalk,
    TreeReader,
    is_image,
    other_folders,
    other_folders_note,
    refuse_links,
)

CLS_LOC = Path("ILSVRC/Data/CLS-LOC")
MOST_NAMED = 3  # folders in an error


def kaggle_tree(path: Path, options: SourceOptions, *, check_md5: bool = False) -> Tree | None:
    """Return Kaggle's tree, given as the folder that holds ILSVRC, as ILSVRC, or as CLS-LOC in it."""
    for top in (path, path.parent, *path.parents[2:3]):
        data = top / CLS_LOC
        if path in (top, top / "ILSVRC", data) and data.is_dir():
            if not options.follow_symlinks:
                refuse_links(top, data)
            return _tree("kaggle-tree", data, top, options, check_md5)
    return None


def extracted_tree(path: Path, options: SourceOptions, *, check_md5: bool = False) -> Tree | None:
    """Return the source of a folder with ``train``, ``val`` or ``test`` in it, else None."""
    return _tree("extracted-tree", path, path, options, check_md5)


def class_folders(path: Path, split: str, options: SourceOptions) -> Tree | None:
    """Return the source of a folder of class folders, taken for that split, else None.

    Raises UsageError if the folders are splits or whole datasets, or images and their masks.
    """
    walk = FolderWalk(path, options.follow_symlinks)
    names = walk.folders()
    walk.problems.raise_all()
    refuse_unpaired(path, path, names)
    for name in names:
        has_no_image = walk.folders(name) and not any(map(is_image, walk.files(name)))
        nested = _with_splits(path / name, 3 if has_no_image else 1 if len(names) == 1 else 0)
        if nested or has_no_image:
            found = "folders but no images" if has_no_image else "splits"
            advice = " or ".join(map(str, nested[:MOST_NAMED])) or "the folder that holds the class folders"
            raise UsageError(
                f"holds {found}, so it is not a class; splits are named train, val and test: give {advice}",
                path=path / name,
            )
    if not names and any(map(is_image, walk.files())):
        raise UsageError(
            "holds images outside class folders, and nothing says which class they belong to; sort them "
            "into <class>/, or convert a list of paths and labels",
            path=path,
        )
    if not names:
        return None
    annotations, locations = AnnotationFiles(), {split: ""}
    return Tree(
        layout="class-folders",
        annotation_files=annotations,
        root=path,
        locations=locations,
        source_options=options,
    )


def _tree(layout: str, root: Path, beside: Path, options: SourceOptions, check_md5: bool) -> Tree | None:
    locations = split_folders(root)
    if not locations:
        return None
    walk, test = FolderWalk(root, options.follow_symlinks), locations.get("test")
    if test and (root / test / "test").is_dir() and walk.folders(test) == ["test"]:
        locations["test"] = f"{test}/test"  # the official archive has a folder test in it
    return Tree(
        layout=layout,
        annotation_files=AnnotationFiles.beside(beside),
        beside=beside,
        check_md5=check_md5,
        root=root,
        locations=locations,
        source_options=options,
    )


def _with_splits(folder: Path, depth: int) -> list[Path]:
    """Return the folder if it holds folders of splits, or those below it, to this depth, that do."""
    if not depth or split_folders(folder):
        return [folder] * bool(depth)
    with os.scandir(folder) as entries:
        inner = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
    return [
        found
        for name in inner
        if not name.startswith(".")
        for found in _with_splits(folder / name, depth - 1)
    ]


@dataclass(frozen=True, kw_only=True)
class Tree(IlsvrcSource):
    """A source in folders; ``locations`` has the folder of each split, relative to ``root``."""

    root: Path
    locations: Mapping[str, str]
    source_options: SourceOptions

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in self.locations)

    @property
    def folders(self) -> tuple[Path, ...]:
        tops = (self.root.joinpath(*Path(place).parts[:1]) for place in self.locations.values())
        if not self.source_options.follow_symlinks:
            return tuple(tops)
        places = (
            self.root / place / name
            for split, place in self.locations.items()
            for name in ("", *self.classes[split])
        )
        return (*tops, *(place.resolve() for place in places if place.is_symlink()))

    @cached_property
    def labels(self) -> LabelSpace:
        return self.annotation_files.space or LabelSpace.of(
            c for classes in self.classes.values() for c in classes
        )

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """The class folders of each split, none if it is flat. Raises SourceDamaged if one cannot be used."""
        walk = self.walk()
        classes = {split: walk.folders(folder) for split, folder in self.locations.items()}
        walk.problems.raise_all()
        for split, names in classes.items():
            refuse_unpaired(self.root, self.root / self.locations[split], names)
        return classes

    @property
    def _places(self) -> list[Path]:
        return [self.root / place for place in self.locations.values()]

    def refuse_others(self) -> None:
        """Raise UsageError for a folder that may be a split or one of several classes."""
        others = other_folders(self.root, self._places)
        if others and "train" not in self.locations:
            split, name = next(iter(self.locations.items()))
            raise UsageError(
                f"holds {name} beside other folders of images: {', '.join(others[:MOST_NAMED])}; rename it if it "
                f"is a class, or give {self.root / name} with --split {split}",
                path=self.root,
            )

    def walk(self) -> FolderWalk:
        """Return a new walk through the tree."""
        return FolderWalk(self.root, self.source_options.follow_symlinks)

    def find(self, split: str, problems: Problems, known: Entries | None = None) -> Listing:
        with foreign_file(self.root, "remove the unexpected files"):
            return self._listed(split, problems)

    def _listed(self, split: str, problems: Problems) -> Listing:
        place, classes = self.locations[split], self.classes[split]
        walk, table = replace(self.walk(), problems=problems), EntryTable(self.root, problems)
        if classes or split == "train":
            for file in walk.files(place):
                if not walk.is_left_out(file, place):
                    loose = self.root / place / file.path
                    problems.add(SourceDamaged("is not in a class folder; move it into one", path=loose))
        truth = self.ground_truth(flat=not classes) if split == "val" else None
        for name in classes or ([] if split == "train" else [""]):
            here, known = f"{place}/{name}".strip("/"), problems.cases
            label = self.labels.label_of.get(name) if name else UNLABELLED
            if label is None:
                other = f"{name} is not one of the {len(self.labels)} classes; rename it"
                problems.add(LabelConflict(other, path=self.root / here), "class")
                continue
            is_empty = True
            for file in walk.files_below(here) if name else walk.files(here):
                if self.source_options.skip_non_images and walk.is_left_out(file, here):
                    continue
                is_empty = False
                with problems.collected("label"):
                    path, file_name = f"{name}/{file.path}".lstrip("/"), file.path.rpartition("/")[2]
                    stem = file_name.rpartition(".")[0] or file_name
                    table.append(
                        record_key(path.partition("/")[0], path),
                        truth.label_of(stem, folder=name or None) if truth else label,
                        length=file.size,
                        path=f"{here}/{file.path}".lstrip("/").encode(),
                        mtime_ns=file.mtime_ns,
                    )
            if name and is_empty and problems.cases == known and self.expected(split) is None:
                empty = "this class has no image; add some, or remove the folder"
                problems.add(SourceDamaged(empty, path=self.root / here))
        reader = TreeReader(self.root, self.source_options.follow_symlinks)
        return Listing(
            split,
            self.layout,
            table.finish(),
            self.labels,
            reader,
            problems=problems,
            ignored=dict(walk.ignored),
            notes=other_folders_note(self.root, self._places),
            options=self.source_options.kept("follow_symlinks", "skip_non_images"),
        )
