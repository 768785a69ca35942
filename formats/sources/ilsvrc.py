"""The sources of ILSVRC12: the official archives, read in place, and trees of folders.

Archives are a tar of class tars or flat tars; trees are extracted archives, Kaggle's, or class folders.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from shardprep.formats.errors import LabelConflict, SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.labels import OFFICIAL_IMAGES, UNLABELLED, LabelSpace, official_words
from shardprep.formats.runtime.files import ArchiveFile, ReadAt
from shardprep.formats.runtime.json_record import sha256_of
from shardprep.formats.shards.read import Rows
from shardprep.formats.sources.annotations import (
    FIRST_VAL,
    WANTED_FOR_VAL,
    AnnotationFiles,
    GroundTruth,
    check_first_label,
    find_boxes,
    read_boxes,
)
from shardprep.formats.sources.devkit import FORMS
from shardprep.formats.sources.listing import EntryTable, record_key
from shardprep.formats.sources.pairs import refuse_unpaired
from shardprep.formats.sources.source import (
    Entries,
    Listing,
    Problems,
    Source,
    SourceOptions,
    split_folders,
)
from shardprep.formats.sources.tar import (
    CopiedFiles,
    Member,
    TarReader,
    archive_of,
    files_in,
    headers_ahead,
    opened_archive,
    walk,
)
from shardprep.formats.sources.trees import (
    FolderWalk,
    TreeReader,
    is_image,
    other_folders,
    other_folders_note,
    refuse_links,
)
from shardprep.formats.storage.archive import RemoteArchive, RemoteFile
from shardprep.formats.storage.store import Location

MOST_NAMED = 3  # classes or folders in a message


@dataclass(frozen=True, kw_only=True)
class IlsvrcSource(Source):
    """A source with annotation files beside its images; ``of_split`` has the archive or folder of each split.

    ``beside`` is the folder searched for annotations and boxes, and ``url`` is where it was copied from.
    With ``check_md5``, listing a split reads its whole archive.
    """

    layout: str
    of_split: Mapping[str, Any]
    beside: Path | None = None
    url: str = ""
    check_md5: bool = False
    official_packing: ClassVar[bool] = False

    @cached_property
    def annotation_files(self) -> AnnotationFiles:
        return AnnotationFiles(self.beside)

    @cached_property
    @abstractmethod
    def labels(self) -> LabelSpace:
        """The label space of all splits."""

    @abstractmethod
    def find(self, split: str, known: Entries | None = None) -> Listing:
        """Return the listing of an existing split, without the fields that :meth:`listed` adds."""

    @property
    def description(self) -> str:
        devkit = " with devkit" if self.annotation_files.devkit else ""
        return f"{self.layout}: {', '.join(self.splits)}{devkit} ({self.labels.counted})"

    def listed(self, split: str, known: Entries | None) -> Listing:
        found = self.find(split, known)
        if split == "val":
            first = found.entries["label"][found.entries["key"] == FIRST_VAL.encode()].tolist()
            check_first_label(self.labels, len(found.entries), first[0] if first else None, "the source")
        expected = self.expected(split)
        differs = expected is not None and expected != len(found.entries)
        archives = [self.of_split[split]] if self.official_packing else []
        if (devkit := self.annotation_files.path(*FORMS)) and devkit.is_file():
            archives.append(devkit)
        return replace(
            found,
            archives=tuple(archive_of(path, check_md5=self.check_md5) for path in archives),
            expected=expected,
            shortfall=self._shortfall(split, found.entries, expected or 0) if differs else "",
        )

    def expected(self, split: str) -> int | None:
        """Return the official or annotated number of images; None if unknown."""
        if self.labels.is_official or (self.official_packing and self.annotation_files.devkit is None):
            return OFFICIAL_IMAGES[split]
        if split == "train":
            return sum(self.annotation_files.train_images.values()) or None
        named = len(self.truth.images) if split == "val" else 0
        return named or sum(self.annotation_files.image_set(split).values()) or None

    def _shortfall(self, split: str, entries: Entries, expected: int) -> str:
        """Return a phrase that names missing or surplus images; empty if they are unknown."""
        if split == "train":
            per_class, wrong = self.annotation_files.train_images, []
            found = np.bincount(entries["label"], minlength=len(self.labels)).tolist()
            for one, have in zip(self.labels.classes, found, strict=True):
                want = per_class.get(one.name)
                if not have if want is None else have != want:
                    wrong.append(f"{one.name} has {have}" + ("" if want is None else f" of {want}"))
            more = [f"{len(wrong) - MOST_NAMED} more classes differ"] if len(wrong) > MOST_NAMED else []
            return ", ".join(wrong[:MOST_NAMED] + more)
        named = self.truth.images if split == "val" else []
        official = (f"ILSVRC2012_{split}_{number:08d}" for number in range(1, expected + 1))
        there = {PurePosixPath(key.decode()).stem for key in entries["key"].tolist()}
        wanted = named if len(named) == expected else official
        missing = next((image for image in wanted if image not in there), None)
        return f"{missing} is missing" if missing else ""

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        path = find_boxes(self.beside, split) if self.beside else None
        return read_boxes(path, labels) if path else None

    @cached_property
    def truth(self) -> GroundTruth:
        """The labels of val in the files beside the images."""
        return self.annotation_files.ground_truth(self.labels)

    def truth_of_flat(self) -> GroundTruth:
        """Return the labels of a val without class folders. Raises SourceIncomplete if no file has them."""
        if not self.truth.said:
            raise SourceIncomplete(
                "nothing says which classes the val images belong to; sort them into val/<class>/, put "
                f"{WANTED_FOR_VAL} beside them, or convert a list of paths and labels",
                path=self.url or self.beside,
            )
        return self.truth


OpenArchive = ArchiveFile | RemoteArchive
ARCHIVES = {  # the patched test images come before those of 2012
    "train": ("ILSVRC2012_img_train.tar",),
    "val": ("ILSVRC2012_img_val.tar",),
    "test": ("ILSVRC2012_img_test_v10102019.tar", "ILSVRC2012_img_test*.tar"),
}
_BESIDE = (  # small files to read, and to request from a web server
    *(form for form in FORMS if "." in form),
    "LOC_synset_mapping.txt",
    "LOC_val_solution.csv",
    "val.txt",
    "ILSVRC2012_bbox_train_v2.tar.gz",
    "ILSVRC2012_bbox_val_v3.tgz",
)
_MEMBERS = {
    "train": re.compile(r"(n\d{8})\.tar", re.ASCII),
    "val": re.compile(r"(ILSVRC2012_val_\d{8})\.(?:JPEG|jpeg|jpg)", re.ASCII),
    "test": re.compile(r"(?:test/)?(ILSVRC2012_test_\d{8})\.(?:JPEG|jpeg|jpg)", re.ASCII),
}
_TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.(?:JPEG|jpeg|jpg)", re.ASCII)


def _archives_among(names: Iterable[str]) -> dict[str, str]:
    """Return the archive's name for each split that has one."""
    names, found = sorted(names), {}
    for split, wanted in ARCHIVES.items():
        matching = [name for each in wanted for name in names if fnmatchcase(name, each)]
        if matching:
            found[split] = matching[0]
    return found


def official_tars(folder: Path, *, check_md5: bool = False) -> OfficialTars | None:
    """Return the source of a folder's archives with official names; None if there are none."""
    names = _archives_among(each.name for each in folder.iterdir())
    paths = {split: folder / name for split, name in names.items()}
    return OfficialTars(of_split=paths, beside=folder, check_md5=check_md5) if paths else None


def single_tar(path: Path, *, check_md5: bool = False) -> OfficialTars | None:
    """Return the source of one archive, whose first member tells the split; None for other archives."""
    with ArchiveFile(path) as archive:
        first = next(walk(archive.read_at, archive=str(path), end=archive.end), None)
    splits = [split for split, names in _MEMBERS.items() if first and names.fullmatch(first.name)]
    paths = dict.fromkeys(splits, path)
    return OfficialTars(of_split=paths, beside=path.parent, check_md5=check_md5) if paths else None


def remote_tars(place: Location, *, check_md5: bool = False) -> OfficialTars:
    """Return the source of archives with official names in object storage or on a server.

    The small files beside them are copied to a temporary folder. Raises UsageError if there are no such
    archives, SourceDamaged, RemoteFailed.
    """
    wanted = [name.replace("*", "") for names in (*ARCHIVES.values(), _BESIDE) for name in names]
    files = files_in(place, wanted)
    paths = {split: files[name] for split, name in _archives_among(files).items()}
    if not paths:
        raise UsageError(
            f"has none of the official tars, such as {ARCHIVES['train'][0]}, or does not list them; only "
            "these are read from a URL, which must be that of their folder",
            path=place.url,
        )
    copied = CopiedFiles(
        file for name, file in files.items() if any(fnmatchcase(name, each) for each in _BESIDE)
    )
    return OfficialTars(
        of_split=paths, beside=copied.folder, check_md5=check_md5, copied=copied, url=place.url
    )


@dataclass(frozen=True, kw_only=True)
class OfficialTars(IlsvrcSource):
    """The official archives; ``copied`` are the small files beside those in object storage."""

    layout: str = "official-tars"
    of_split: Mapping[str, Path | RemoteFile]
    copied: CopiedFiles | None = field(default=None, compare=False, repr=False)
    official_packing = True

    @cached_property
    def labels(self) -> LabelSpace:
        if self.annotation_files.space is not None:
            return self.annotation_files.space
        wnids: set[str] = set()
        if "train" in self.of_split:
            with opened_archive(self.of_split["train"]) as archive:
                wnids = {wnid for wnid, _ in _members(archive, "train")}
        return LabelSpace.of(official_words() if wnids <= official_words().keys() else wnids)

    def known_by(self, split: str) -> Mapping[str, Any]:
        truth = self.truth_of_flat().said if split == "val" else {}
        path = self.of_split[split]
        return {
            "archive": path.url if isinstance(path, RemoteFile) else os.fsencode(path.resolve()).hex(),
            "state": archive_of(path).state,
            "split": split,
            "classes": self.labels.digest,
            "truth": sha256_of([[name, dict(labels)] for name, labels in truth.items()]),
        }

    def find(self, split: str, known: Entries | None = None) -> Listing:
        path, problems = self.of_split[split], Problems()
        with opened_archive(path) as archive:
            entries = self._listed(archive, split, problems) if known is None else known
        identity = archive.identity if isinstance(archive, ArchiveFile) else None
        return Listing(
            split,
            self.layout,
            entries,
            self.labels,
            TarReader(path, identity),
            problems=problems,
            kept_by=self.known_by(split) if self.url else None,
        )

    def _listed(self, archive: OpenArchive, split: str, problems: Problems) -> Entries:
        table, label_of = EntryTable(archive.path, problems), self.labels.label_of
        if split == "train":
            for wnid, images in archive.mapped(partial(_images_of, archive), _members(archive, split)):
                if wnid not in label_of:
                    raise LabelConflict(
                        f"the class {wnid} is not in the devkit; use the devkit of these images",
                        path=archive.path,
                    )
                for image in images:
                    key = record_key(wnid, f"{wnid}/{image.name}")
                    table.append(key, label_of[wnid], length=image.size, offset=image.offset)
        else:
            truth = self.truth_of_flat() if split == "val" else None
            for key, image in _members(archive, split):
                label = truth.label_of(key) if truth else UNLABELLED
                table.append(key, label, length=image.size, offset=image.offset)
        return table.finish()


def _images_of(archive: OpenArchive, class_tar: tuple[str, Member]) -> tuple[str, list[Member]]:
    wnid, tar = class_tar
    place, images = f"{archive.path}: {tar.name}", []
    for image in walk(archive.read_at, archive=place, start=tar.offset, end=tar.offset + tar.size):
        match = _TRAIN_IMAGE.fullmatch(image.name)
        if match is None or match[1] != wnid:
            raise _unexpected(image, place)
        images.append(image)
    return wnid, images


def _members(archive: OpenArchive, split: str) -> Iterator[tuple[str, Member]]:
    """Yield each member with the wnid or image in its name."""
    read_at: ReadAt = archive.read_at
    if isinstance(archive, ArchiveFile):
        archive.expect_random_reads()
    elif split != "train":  # its class tars are read concurrently instead
        read_at = headers_ahead(archive)
    for member in walk(read_at, archive=str(archive.path), end=archive.end):
        match = _MEMBERS[split].fullmatch(member.name)
        if match is None:
            raise _unexpected(member, str(archive.path))
        yield match[1], member


def _unexpected(member: Member, place: str) -> SourceDamaged:
    return SourceDamaged(
        f"at byte {member.offset}: {member.name!r} does not belong here; use the official archive", path=place
    )


CLS_LOC = Path("ILSVRC/Data/CLS-LOC")


def kaggle_tree(path: Path, options: SourceOptions, *, check_md5: bool = False) -> Tree | None:
    """Return Kaggle's tree, given the folder of ILSVRC, ILSVRC itself, or CLS-LOC in it, else None."""
    for top in (path, path.parent, *path.parents[2:3]):
        data = top / CLS_LOC
        if path in (top, top / "ILSVRC", data) and data.is_dir():
            if not options.follow_symlinks:
                refuse_links(top, data)
            return tree("kaggle-tree", data, top, options, check_md5)
    return None


def class_folders(path: Path, split: str, options: SourceOptions) -> Tree | None:
    """Return the source of a folder of class folders, as that split, else None.

    Raises UsageError if the folders are splits or whole datasets, or images and their masks.
    """
    walk = FolderWalk(path, options.follow_symlinks)
    names = walk.folders()
    walk.problems.raise_all()
    refuse_unpaired(path, names)
    for name in names:
        has_no_image = walk.folders(name) and not any(map(is_image, walk.files(name)))
        if has_no_image or (len(names) == 1 and split_folders(path / name)):
            raise UsageError(
                "holds folders instead of images, so it is not a class; give the folder that holds the splits (train, val, "
                "test) or the class folders",
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
    return Tree(layout="class-folders", of_split={split: ""}, root=path, source_options=options)


def tree(layout: str, root: Path, beside: Path, options: SourceOptions, check_md5: bool) -> Tree | None:
    """Return the source of a folder that contains ``train``, ``val`` or ``test``, else None."""
    places = split_folders(root)
    if not places:
        return None
    walk, test = FolderWalk(root, options.follow_symlinks), places.get("test")
    if test and (root / test / "test").is_dir() and walk.folders(test) == ["test"]:
        places["test"] = f"{test}/test"  # the official archive contains a folder test
    return Tree(
        layout=layout, of_split=places, root=root, source_options=options, beside=beside, check_md5=check_md5
    )


@dataclass(frozen=True, kw_only=True)
class Tree(IlsvrcSource):
    """A source in folders, which are relative to ``root``."""

    of_split: Mapping[str, str]
    root: Path
    source_options: SourceOptions

    @property
    def folders(self) -> tuple[Path, ...]:
        tops = (self.root.joinpath(*Path(place).parts[:1]) for place in self.of_split.values())
        if not self.source_options.follow_symlinks:
            return tuple(tops)
        names = (
            (place, name) for split, place in self.of_split.items() for name in ("", *self.classes[split])
        )
        places = (self.root / place / name for place, name in names)
        return (*tops, *(place.resolve() for place in places if place.is_symlink()))

    @cached_property
    def labels(self) -> LabelSpace:
        found = (name for names in self.classes.values() for name in names)
        return self.annotation_files.space or LabelSpace.of(found)

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """The class folders of each split, none if it is flat. Raises SourceDamaged for unusable folders."""
        walk = FolderWalk(self.root, self.source_options.follow_symlinks)
        classes = {split: walk.folders(folder) for split, folder in self.of_split.items()}
        walk.problems.raise_all()
        for split, names in classes.items():
            refuse_unpaired(self.root / self.of_split[split], names)
        return classes

    @property
    def _folders(self) -> list[Path]:
        return [self.root / place for place in self.of_split.values()]

    def refuse_others(self) -> None:
        """Raise UsageError for a folder that may be either a split or a class."""
        others = other_folders(self.root, self._folders)
        if others and "train" not in self.of_split:
            split, name = next(iter(self.of_split.items()))
            raise UsageError(
                f"holds {name} beside other folders of images: {', '.join(others[:MOST_NAMED])}; rename it if it "
                f"is a class, or give {self.root / name} with --split {split}",
                path=self.root,
            )

    def find(self, split: str, known: Entries | None = None) -> Listing:
        place, classes, problems = self.of_split[split], self.classes[split], Problems()
        walk = FolderWalk(self.root, self.source_options.follow_symlinks, problems)
        table = EntryTable(self.root, problems)
        if classes or split == "train":
            for file in walk.files(place):
                if not walk.is_left_out(file, place):
                    loose = self.root / place / file.path
                    problems.add(SourceDamaged("is not in a class folder; move it into one", path=loose))
        truth = None
        if split == "val":
            truth = self.truth if classes else self.truth_of_flat()
        for name in classes or ([] if split == "train" else [""]):
            here = f"{place}/{name}".strip("/")
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
                        file=file._replace(path=f"{here}/{file.path}".lstrip("/")),
                    )
            if name and is_empty and self.expected(split) is None:
                empty = "this class has no image; add some, or remove the folder"
                problems.add(SourceDamaged(empty, path=self.root / here))
        return Listing(
            split,
            self.layout,
            table.finish(),
            self.labels,
            TreeReader(self.root, walk.follow_symlinks),
            problems=problems,
            ignored=dict(walk.ignored),
            notes=other_folders_note(self.root, self._folders),
            options=self.source_options.kept("follow_symlinks", "skip_non_images"),
        )
