"""Sources of images in folders: an extracted ILSVRC12, Kaggle's tree, and any class folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardprep.formats.errors import LabelConflict, SourceDamaged, UsageError
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.sources.annotations.annotation_files import AnnotationFiles
from shardprep.formats.sources.listing.entry_table import EntryTable, record_key
from shardprep.formats.sources.listing.source import SPLITS
from shardprep.formats.sources.listing.tree_files import (
    FoundFile,
    TreeReader,
    files_below,
    files_in,
    folders_in,
    refuse_links,
)
from shardprep.formats.system.foreign_file import foreign_file

from .ilsvrc_source import Found, IlsvrcSource

CLS_LOC = Path("ILSVRC/Data/CLS-LOC")
IMAGE_SUFFIXES = (
    *(".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif"),
    *(".jp2", ".j2k", ".jpc", ".pbm", ".pgm", ".ppm", ".pnm", ".avif", ".ras", ".sr"),
    *(".heic", ".heif", ".jxl", ".exr", ".hdr", ".pfm", ".pam"),  # found, to be refused by name
)
"""The names by which a folder is taken for a class; the bytes of a file decide whether it is an image."""
_OTHER_NAMES = {"training": "train", "valid": "val", "validation": "val", "eval": "val", "testing": "test"}


def kaggle_tree(path: Path, *, check_md5: bool = False) -> Tree | None:
    """Return Kaggle's tree, given as the folder that holds ILSVRC, as ILSVRC, or as CLS-LOC in it."""
    for top in (path, path.parent, *path.parents[2:3]):
        data = top / CLS_LOC
        if path in (top, top / "ILSVRC", data) and data.is_dir():
            refuse_links(top, data)
            return _tree("kaggle-tree", data, top, check_md5)
    return None


def extracted_tree(path: Path, *, check_md5: bool = False) -> Tree | None:
    """Return the source of a folder with ``train``, ``val`` or ``test`` in it, else None."""
    return _tree("extracted-tree", path, path, check_md5)


def class_folders(path: Path, split: str) -> Tree | None:
    """Return the source of a folder of class folders, taken for that split, else None.

    Raises UsageError if the folders are splits or whole datasets.
    """
    names = folders_in(path)
    _refuse_misnamed_splits(path)
    for name in names:
        if folders_in(path, name) and not any(map(_is_image, files_in(path, name))):
            raise UsageError(
                "holds folders and no image, so it is no class; rename the splits to train, val and test, "
                "or give the folder that holds the class folders",
                path=path / name,
            )
    if not names:
        return None
    return Tree(layout="class-folders", annotation_files=AnnotationFiles(), root=path, locations={split: ""})


def _tree(layout: str, root: Path, beside: Path, check_md5: bool) -> Tree | None:
    locations = {split: split for split in SPLITS if (root / split).is_dir()}
    if not locations:
        return None
    _refuse_misnamed_splits(root)
    if (root / "test/test").is_dir() and folders_in(root, "test") == ["test"]:
        locations["test"] = "test/test"  # the official archive has a folder test in it
    return Tree(
        layout=layout,
        annotation_files=AnnotationFiles.beside(beside),
        beside=(beside,),
        check_md5=check_md5,
        root=root,
        locations=locations,
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

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in self.locations)

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(self.root.joinpath(*Path(place).parts[:1]) for place in self.locations.values())

    @cached_property
    def labels(self) -> LabelSpace:
        return self.annotation_files.space or LabelSpace.of(
            c for classes in self._classes.values() for c in classes
        )

    @cached_property
    def _classes(self) -> dict[str, list[str]]:
        """The class folders of each split, none if it is flat."""
        return {split: folders_in(self.root, folder) for split, folder in self.locations.items()}

    def find(self, split: str) -> Found:
        table = EntryTable(self.root)
        with foreign_file(self.root, "remove what is odd there"):
            if self._classes[split]:
                self._list_classes(split, table)
            else:
                self._list_flat(split, table)
            return Found(table.finish(), TreeReader(self.root))

    def _list_classes(self, split: str, table: EntryTable) -> None:
        self._refuse_loose_images(split)
        truth = self.ground_truth(flat=False) if split == "val" else None
        for name in self._classes[split]:
            place = f"{self.locations[split]}/{name}".lstrip("/")
            folder = self.root / place
            if name not in self.labels.label_of:
                raise LabelConflict(
                    f"{name} is none of the {len(self.labels)} classes; rename it", path=folder
                )
            label = self.labels.label_of[name]
            files = list(files_below(self.root, place))
            if not files and self.expected(split) is None:
                raise SourceDamaged("this class has no image; add some, or remove the folder", path=folder)
            for file in files:
                if truth is not None:
                    label = truth.label_of(_stem(file), folder=name)
                self._append(table, split, f"{name}/{file.path}", file, label)

    def _list_flat(self, split: str, table: EntryTable) -> None:
        if split == "train":
            self._refuse_loose_images(split)
            return
        truth = self.ground_truth(flat=True) if split == "val" else None
        for file in files_in(self.root, self.locations[split]):
            label = UNLABELLED if truth is None else truth.label_of(_stem(file))
            self._append(table, split, file.path, file, label)

    def _append(self, table: EntryTable, split: str, path: str, file: FoundFile, label: int) -> None:
        folder = self.locations[split]
        table.append(
            record_key(path.partition("/")[0], path),
            label,
            length=file.size,
            path=(f"{folder}/{path}" if folder else path).encode(),
            mtime_ns=file.mtime_ns,
        )

    def _refuse_loose_images(self, split: str) -> None:
        folder = self.root / self.locations[split]
        for file in files_in(self.root, self.locations[split]):
            if _is_image(file):
                raise SourceDamaged("lies in no class folder; move it into one", path=folder / file.path)


def _is_image(file: FoundFile) -> bool:
    return file.path.lower().endswith(IMAGE_SUFFIXES)


def _stem(file: FoundFile) -> str:
    name = file.path.rpartition("/")[2]
    return name.rpartition(".")[0] or name
