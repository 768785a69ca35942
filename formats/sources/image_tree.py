"""Sources of images in folders: an extracted ILSVRC12, Kaggle's tree, and any class folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardprep.formats.errors import LabelConflict, SourceDamaged, UsageError
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.sources.annotations.annotation_files import AnnotationFiles
from shardprep.formats.sources.annotations.ground_truth import GroundTruth
from shardprep.formats.sources.listing.entry_table import EntryTable, record_key
from shardprep.formats.sources.listing.image_names import IMAGE_SUFFIXES
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import SPLITS
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.tree_files import FolderWalk, FoundFile, refuse_links
from shardprep.formats.sources.listing.tree_reader import TreeReader
from shardprep.formats.system.foreign_file import foreign_file

from .ilsvrc_source import Found, IlsvrcSource

CLS_LOC = Path("ILSVRC/Data/CLS-LOC")
_OTHER_NAMES = {"training": "train", "valid": "val", "validation": "val", "eval": "val", "testing": "test"}


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

    Raises UsageError if the folders are splits or whole datasets.
    """
    walk = FolderWalk(path, options.follow_symlinks)
    names = walk.folders()
    walk.problems.raise_all()
    _refuse_misnamed_splits(path)
    for name in names:
        if walk.folders(name) and not any(map(_is_image, walk.files(name))):
            raise UsageError(
                "holds folders and no image, so it is no class; rename the splits to train, val and test, "
                "or give the folder that holds the class folders",
                path=path / name,
            )
    if not names and any(map(_is_image, walk.files())):
        raise UsageError(
            "holds images that lie in no class folders, and nothing says of which class they are; sort them into "
            "<class>/, or convert a list of paths and labels",
            path=path,
        )
    if not names:
        return None
    return Tree(
        layout="class-folders",
        annotation_files=AnnotationFiles(),
        root=path,
        locations={split: ""},
        source_options=options,
    )


def _tree(layout: str, root: Path, beside: Path, options: SourceOptions, check_md5: bool) -> Tree | None:
    locations = {split: split for split in SPLITS if (root / split).is_dir()}
    if not locations:
        return None
    _refuse_misnamed_splits(root)
    walk = FolderWalk(root, options.follow_symlinks)
    if (root / "test/test").is_dir() and walk.folders("test") == ["test"]:
        locations["test"] = "test/test"  # the official archive has a folder test in it
    return Tree(
        layout=layout,
        annotation_files=AnnotationFiles.beside(beside),
        beside=(beside,),
        check_md5=check_md5,
        root=root,
        locations=locations,
        source_options=options,
    )


def _refuse_misnamed_splits(root: Path) -> None:
    """Raise UsageError for a folder with another name of a split: it is neither left out nor made a class."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        lower = folder.name.lower()
        meant = lower if lower in SPLITS else _OTHER_NAMES.get(lower)
        if meant not in (None, folder.name):
            raise UsageError(
                f"is not how a split is called; rename it to {meant}, or move it away", path=folder
            )


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
    def options(self) -> Mapping[str, Any]:
        return self.source_options.kept("follow_symlinks")

    @property
    def folders(self) -> tuple[Path, ...]:
        tops = (self.root.joinpath(*Path(place).parts[:1]) for place in self.locations.values())
        return (*tops, *(self._targets if self.source_options.follow_symlinks else ()))

    @property
    def _targets(self) -> tuple[Path, ...]:
        """What the folders of splits and of classes are links to."""
        places = [
            self.root / place / name
            for split, place in self.locations.items()
            for name in ("", *self.classes[split])
        ]
        return tuple(place.resolve() for place in places if place.is_symlink())

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
        return classes

    def walk(self) -> FolderWalk:
        """Return a new walk through the tree."""
        return FolderWalk(self.root, self.source_options.follow_symlinks)

    def find(self, split: str, problems: Problems) -> Found:
        listing = _SplitListing(self, split, problems)
        with foreign_file(self.root, "remove what is odd there"):
            return listing.found()


class _SplitListing:
    """The listing of one split of a tree, while it is made."""

    def __init__(self, tree: Tree, split: str, problems: Problems) -> None:
        self._tree = tree
        self._split = split
        self._place = tree.locations[split]
        self._problems = problems
        self._table = EntryTable(tree.root, problems)
        self._walk = replace(tree.walk(), problems=problems)

    def found(self) -> Found:
        tree = self._tree
        if tree.classes[self._split]:
            self._list_classes()
        else:
            self._list_flat()
        reader = TreeReader(tree.root, tree.source_options.follow_symlinks)
        return Found(self._table.finish(), reader, ignored=self._walk.ignored)

    def _list_classes(self) -> None:
        self._refuse_loose_images()
        truth = self._tree.ground_truth(flat=False) if self._split == "val" else None
        for name in self._tree.classes[self._split]:
            label = self._tree.labels.label_of.get(name)
            if label is None:
                self._refuse_class(name)
            else:
                self._list_class(name, label, truth)

    def _list_class(self, name: str, label: int, truth: GroundTruth | None) -> None:
        place = f"{self._place}/{name}".lstrip("/")
        empty, known = True, self._problems.cases
        for file in self._walk.files_below(place):
            empty = False
            with self._problems.collected("label"):
                if truth is not None:
                    label = truth.label_of(_stem(file), folder=name)
                self._append(f"{name}/{file.path}", file, label)
        if empty and self._problems.cases == known and self._tree.expected(self._split) is None:
            self._problems.add(
                SourceDamaged(
                    "this class has no image; add some, or remove the folder", path=self._tree.root / place
                )
            )

    def _refuse_class(self, name: str) -> None:
        error = LabelConflict(
            f"{name} is none of the {len(self._tree.labels)} classes; rename it",
            path=self._tree.root / self._place / name,
        )
        self._problems.add(error, "class")

    def _list_flat(self) -> None:
        if self._split == "train":
            self._refuse_loose_images()
            return
        truth = self._tree.ground_truth(flat=True) if self._split == "val" else None
        for file in self._walk.files(self._place):
            with self._problems.collected("label"):
                label = UNLABELLED if truth is None else truth.label_of(_stem(file))
                self._append(file.path, file, label)

    def _append(self, path: str, file: FoundFile, label: int) -> None:
        self._table.append(
            record_key(path.partition("/")[0], path),
            label,
            length=file.size,
            path=f"{self._place}/{path}".lstrip("/").encode(),
            mtime_ns=file.mtime_ns,
        )

    def _refuse_loose_images(self) -> None:
        folder = self._tree.root / self._place
        for file in self._walk.files(self._place):
            if _is_image(file):
                self._problems.add(
                    SourceDamaged("lies in no class folder; move it into one", path=folder / file.path)
                )


def _is_image(file: FoundFile) -> bool:
    return file.path.lower().endswith(IMAGE_SUFFIXES)


def _stem(file: FoundFile) -> str:
    name = file.path.rpartition("/")[2]
    return name.rpartition(".")[0] or name
