"""The sources of ILSVRC12: the official archives, read in place, and trees of folders.

Archives are a tar of class tars or flat tars; trees are extracted archives, Kaggle's, or class folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from shardprep.formats.errors import LabelConflict, SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.record import OFFICIAL_IMAGES, UNLABELLED, LabelSpace, official_words
from shardprep.formats.runtime.files import ArchiveFile, ReadAt
from shardprep.formats.runtime.json_record import sha256_of
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.shards.read import Rows
from shardprep.formats.sources.coco import refuse_coco_file
from shardprep.formats.sources.devkit import (
    DEVKIT_NAMES,
    FIRST_VAL,
    VAL_LABEL_FILES,
    AnnotationFiles,
    GroundTruth,
    check_first_label,
    find_boxes,
    read_boxes,
)
from shardprep.formats.sources.listing import EntryTable, record_key
from shardprep.formats.sources.pairs import refuse_unpaired
from shardprep.formats.sources.source import (
    Entries,
    Listing,
    Problems,
    Source,
    SourceOptions,
    split_folders,
    split_from_name,
)
from shardprep.formats.sources.tables import CSV_SUFFIXES, JSON_SUFFIXES
from shardprep.formats.sources.tar import (
    Member,
    TarReader,
    TemporaryCopies,
    describe_archive,
    find_remote_files,
    open_archive,
    prefetch_headers,
    walk_tar,
)
from shardprep.formats.sources.trees import (
    FolderWalk,
    TreeReader,
    find_unused_folders,
    is_image,
    other_folders_note,
    refuse_links,
)
from shardprep.formats.storage.archive import RemoteArchive, RemoteFile
from shardprep.formats.storage.store import Location

MAX_NAMED = 3  # classes or folders in a message


@dataclass(frozen=True, kw_only=True)
class Ilsvrc(Source):
    """Official archives, folders, or both, with annotation files beside them, which tell classes and labels.

    ``annotations`` is the folder searched for annotations and boxes; ``url`` is where the files in it,
    ``copies``, come from. With ``check_md5``, listing a split reads its whole archive.
    """

    by_split: Mapping[str, PackedImages | FolderImages]
    annotations: Path | None = None
    check_md5: bool = False
    url: str = ""
    copies: TemporaryCopies | None = field(default=None, compare=False, repr=False)

    @cached_property
    def annotation_files(self) -> AnnotationFiles:
        return AnnotationFiles(self.annotations)

    @cached_property
    def labels(self) -> LabelSpace:
        """The label space of all splits."""
        if self.annotation_files.space is not None:
            return self.annotation_files.space
        packed = [each for each in self.by_split.values() if isinstance(each, PackedImages)]
        # folders of other classes beside archives would change the labels of the archives' images
        names = {name for images in packed or self.by_split.values() for name in images.classes}
        return LabelSpace.of(official_words() if packed and names <= official_words().keys() else names)

    @property
    def description(self) -> str:
        layouts = {split: self.by_split[split].layout for split in self.splits}
        text = ", ".join(f"{split} of {layout}" for split, layout in layouts.items())
        if len({*layouts.values()}) == 1:
            text = f"{layouts[self.splits[0]]}: {', '.join(layouts)}"
        return f"{text}{' with devkit' * bool(self.annotation_files.devkit)} ({count_of(len(self.labels), 'class')})"

    @property
    def folders(self) -> tuple[Path, ...]:
        images = (each for each in self.by_split.values() if isinstance(each, FolderImages))
        return tuple(dict.fromkeys(folder for each in images for folder in each.folders))

    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        images = self.by_split[split]
        listing = images.list_split(self, split, known_entries)
        entries = listing.entries
        if split == "val":
            first = entries["label"][entries["key"] == FIRST_VAL.encode()].tolist()
            check_first_label(self.labels, len(entries), first[0] if first else None, "the source")
        expected = self.expected_count(split)
        differs = expected is not None and expected != len(entries)
        archives = [images.path] if isinstance(images, PackedImages) else []
        if (devkit := self.annotation_files.find(*DEVKIT_NAMES)) and devkit.is_file():
            archives.append(devkit)
        return replace(
            listing,
            archives=tuple(
                describe_archive(path, check_md5=self.check_md5, progress=self.progress) for path in archives
            ),
            expected=expected,
            shortfall=self._shortfall(split, entries, expected or 0) if differs else "",
        )

    def cache_key(self, split: str) -> Mapping[str, Any] | None:
        images = self.by_split[split]
        if not isinstance(images, PackedImages):
            return None
        truth = self.require_truth().labels_by_file if split == "val" else {}
        path = images.path
        return {
            "archive": path.url if isinstance(path, RemoteFile) else os.fsencode(path.resolve()).hex(),
            "state": describe_archive(path).state,
            "split": split,
            "classes": self.labels.digest,
            "truth": sha256_of([[name, dict(labels)] for name, labels in truth.items()]),
        }

    def expected_count(self, split: str) -> int | None:
        """Return the official or annotated number of images; None if unknown."""
        images = self.by_split[split]
        is_flat = isinstance(images, PackedImages) and not images.classes  # whose classes are in the devkit
        if self.labels.is_official or (is_flat and self.annotation_files.devkit is None):
            return OFFICIAL_IMAGES[split]
        if split == "train":
            return sum(self.annotation_files.train_images.values()) or None
        named = len(self.truth.images) if split == "val" else 0
        return named or sum(self.annotation_files.count_image_set(split).values()) or None

    def _shortfall(self, split: str, entries: Entries, expected: int) -> str:
        """Return a phrase that names missing or surplus images; empty if they are unknown."""
        if split == "train":
            per_class, wrong = self.annotation_files.train_images, []
            counts = np.bincount(entries["label"], minlength=len(self.labels)).tolist()
            for image_class, have in zip(self.labels.classes, counts, strict=True):
                want = per_class.get(image_class.name)
                if not have if want is None else have != want:
                    wrong.append(f"{image_class.name} has {have}" + ("" if want is None else f" of {want}"))
            more = [f"{len(wrong) - MAX_NAMED} more classes differ"] if len(wrong) > MAX_NAMED else []
            return ", ".join(wrong[:MAX_NAMED] + more)
        named = self.truth.images if split == "val" else []
        official = (f"ILSVRC2012_{split}_{number:08d}" for number in range(1, expected + 1))
        stems = {PurePosixPath(key.decode()).stem for key in entries["key"].tolist()}
        candidates = named if len(named) == expected else official
        missing = next((image for image in candidates if image not in stems), None)
        return f"{missing} is missing" if missing else ""

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        path = find_boxes(self.annotations, split) if self.annotations else None
        return read_boxes(path, labels) if path else None

    @cached_property
    def truth(self) -> GroundTruth:
        """The labels of val in the files beside the images."""
        return self.annotation_files.ground_truth(self.labels)

    def require_truth(self) -> GroundTruth:
        """Return the labels of a val without class folders. Raises SourceIncomplete if no file has them."""
        if not self.truth.labels_by_file:
            raise SourceIncomplete(
                "nothing says which classes the val images belong to; sort them into val/<class>/, put "
                f"{VAL_LABEL_FILES} beside them, convert a list of paths and labels, or name COCO's file with --coco",
                path=self.url or self.annotations,
            )
        return self.truth


OpenArchive = ArchiveFile | RemoteArchive
ARCHIVES = {  # the patched test images come before those of 2012
    "train": ("ILSVRC2012_img_train.tar",),
    "val": ("ILSVRC2012_img_val.tar",),
    "test": ("ILSVRC2012_img_test_v10102019.tar", "ILSVRC2012_img_test*.tar"),
}
_SIDE_FILES = (  # small files to read, and to request from a web server
    *(name for name in DEVKIT_NAMES if "." in name),
    "LOC_synset_mapping.txt",
    "LOC_val_solution.csv",
    "val.txt",
    "ILSVRC2012_bbox_train_v2.tar.gz",
    "ILSVRC2012_bbox_val_v3.tgz",
)
_MEMBER_NAMES = {
    "train": re.compile(r"(n\d{8})\.tar", re.ASCII),
    "val": re.compile(r"(ILSVRC2012_val_\d{8})\.(?:JPEG|jpeg|jpg)", re.ASCII),
    "test": re.compile(r"(?:test/)?(ILSVRC2012_test_\d{8})\.(?:JPEG|jpeg|jpg)", re.ASCII),
}
_TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.(?:JPEG|jpeg|jpg)", re.ASCII)


def _match_archives(names: Iterable[str]) -> dict[str, str]:
    """Return the archive's name for each split that has one."""
    names, by_split = sorted(names), {}
    for split, patterns in ARCHIVES.items():
        matching = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
        if matching:
            by_split[split] = matching[0]
    return by_split


def find_archives(folder: Path) -> dict[str, PackedImages]:
    """Return the archives with official names in a folder, by split."""
    names = _match_archives(each.name for each in folder.iterdir())
    return {split: PackedImages(folder / name, split) for split, name in names.items()}


def recognise_tar(path: Path, *, check_md5: bool = False) -> Ilsvrc | None:
    """Return the source of one archive, whose first member tells the split; None for other archives."""
    with ArchiveFile(path) as archive:
        first = next(walk_tar(archive.read_at, archive=str(path), end=archive.end), None)
    splits = [split for split, names in _MEMBER_NAMES.items() if first and names.fullmatch(first.name)]
    by_split = {split: PackedImages(path, split) for split in splits}
    return Ilsvrc(by_split=by_split, annotations=path.parent, check_md5=check_md5) if by_split else None


def find_remote_tars(place: Location, *, check_md5: bool = False) -> Ilsvrc:
    """Return the source of archives with official names in object storage or on a server.

    The small files beside them are copied to a temporary folder. Raises UsageError if there are no such
    archives, SourceDamaged, RemoteFailed.
    """
    wanted = [name.replace("*", "") for names in (*ARCHIVES.values(), _SIDE_FILES) for name in names]
    files = find_remote_files(place, wanted)
    tars = {split: PackedImages(files[name], split) for split, name in _match_archives(files).items()}
    if not tars:
        raise UsageError(
            f"has none of the official tars, such as {ARCHIVES['train'][0]}, or does not list them; only "
            "these are read from a URL, which must be that of their folder",
            path=place.url,
        )
    copies = TemporaryCopies(
        file for name, file in files.items() if any(fnmatchcase(name, each) for each in _SIDE_FILES)
    )
    return Ilsvrc(by_split=tars, annotations=copies.folder, check_md5=check_md5, copies=copies, url=place.url)


@dataclass(frozen=True)
class PackedImages:
    """The images in an official archive."""

    path: Path | RemoteFile
    split: str
    layout = "official-tars"

    @cached_property
    def classes(self) -> Sequence[str]:
        if self.split != "train":
            return ()
        with open_archive(self.path) as archive:
            return [wnid for wnid, _ in _walk_members(archive, "train")]

    def list_split(self, source: Ilsvrc, split: str, known_entries: Entries | None) -> Listing:
        problems = Problems()
        with (
            open_archive(self.path) as archive,
            source.progress.task(f"list {split}", records=0, size=archive.end),
        ):
            entries = self._entries(archive, source, problems) if known_entries is None else known_entries
            source.progress.at(0, archive.end)
        return Listing(
            split,
            self.layout,
            entries,
            source.labels,
            TarReader(self.path, archive.identity if isinstance(archive, ArchiveFile) else None),
            problems=problems,
            cache_key=source.cache_key(split) if source.url else None,
        )

    def _entries(self, archive: OpenArchive, source: Ilsvrc, problems: Problems) -> Entries:
        table, label_of = EntryTable(archive.path, problems), source.labels.label_of
        if self.split == "train":
            for wnid, images in archive.map(partial(_list_class, archive), _walk_members(archive, "train")):
                if wnid not in label_of:
                    raise LabelConflict(
                        f"the class {wnid} is not in the devkit; use the devkit of these images",
                        path=archive.path,
                    )
                for image in images:
                    key = record_key(wnid, f"{wnid}/{image.name}")
                    table.append(key, label_of[wnid], length=image.size, offset=image.offset)
                source.progress.at(0, images[-1].offset if images else 0)
        else:
            truth = source.require_truth() if self.split == "val" else None
            for key, image in _walk_members(archive, self.split):
                label = truth.label_of(key) if truth else UNLABELLED
                table.append(key, label, length=image.size, offset=image.offset)
                source.progress.at(0, image.offset)
        return table.finish()


def _list_class(archive: OpenArchive, class_tar: tuple[str, Member]) -> tuple[str, list[Member]]:
    wnid, tar = class_tar
    place, images = f"{archive.path}: {tar.name}", []
    for image in walk_tar(archive.read_at, archive=place, start=tar.offset, end=tar.offset + tar.size):
        match = _TRAIN_IMAGE.fullmatch(image.name)
        if match is None or match[1] != wnid:
            raise _unexpected_member(image, place)
        images.append(image)
    return wnid, images


def _walk_members(archive: OpenArchive, split: str) -> Iterator[tuple[str, Member]]:
    """Yield each member with the wnid or image in its name."""
    read_at: ReadAt = archive.read_at
    if isinstance(archive, ArchiveFile):
        archive.expect_random_reads()
    elif split != "train":  # its class tars are read concurrently instead
        read_at = prefetch_headers(archive)
    for member in walk_tar(read_at, archive=str(archive.path), end=archive.end):
        match = _MEMBER_NAMES[split].fullmatch(member.name)
        if match is None:
            raise _unexpected_member(member, str(archive.path))
        yield match[1], member


def _unexpected_member(member: Member, place: str) -> SourceDamaged:
    return SourceDamaged(
        f"at byte {member.offset}: {member.name!r} does not belong here; use the official archive", path=place
    )


CLS_LOC = Path("ILSVRC/Data/CLS-LOC")


def recognise_official(path: Path, options: SourceOptions, *, check_md5: bool = False) -> Ilsvrc | None:
    """Return the source of official archives, Kaggle's tree and split folders, else None.

    Kaggle's tree is found from the folder of ILSVRC, ILSVRC itself, or CLS-LOC in it. Of a split that exists
    twice, the first of these is used. Raises UsageError for a folder that may be either a split or a class.
    """
    annotations, packed, kaggle = path, find_archives(path), dict[str, FolderImages]()
    for top in (path, path.parent, *path.parents[2:3]):
        data = top / CLS_LOC
        if not kaggle and path in (top, top / "ILSVRC", data) and data.is_dir():
            if not options.follow_symlinks:
                refuse_links(top, data)
            annotations, kaggle = top, _find_split_images("kaggle-tree", data, options)
    folders = _find_split_images("extracted-tree", path, options)
    if folders and not packed and not kaggle and "train" not in folders:
        split, images = next(iter(folders.items()))
        if others := find_unused_folders(path, [each.top for each in folders.values()]):
            raise UsageError(
                f"holds {images.folder} beside other folders of images: {', '.join(others[:MAX_NAMED])}; rename it "
                f"if it is a class, or give {images.top} with --split {split}",
                path=path,
            )
    by_split: dict[str, PackedImages | FolderImages] = {**folders, **kaggle, **packed}
    return Ilsvrc(by_split=by_split, annotations=annotations, check_md5=check_md5) if by_split else None


def _find_split_images(layout: str, root: Path, options: SourceOptions) -> dict[str, FolderImages]:
    """Return the images in the folders ``train``, ``val`` and ``test`` of a folder."""
    folders = split_folders(root)
    walk, train = FolderWalk(root, options.follow_symlinks), root / folders.get("train", "")
    for split, folder in list(folders.items()):
        for inner in ("test", "images"):  # the official archive contains a folder test
            is_other = split == inner or (split != "train" and train != root and not (train / inner).is_dir())
            if is_other and (root / folder / inner).is_dir() and walk.folders(folder) == [inner]:
                folders[split] = f"{folder}/{inner}"
    return {split: FolderImages(layout, root, folder, options) for split, folder in folders.items()}


def recognise_class_folders(path: Path, split: str, options: SourceOptions) -> Ilsvrc | None:
    """Return the source of a folder of class folders, as that split, else None.

    Raises UsageError if the folders are splits or whole datasets, or images and their masks.
    """
    walk = FolderWalk(path, options.follow_symlinks)
    names = walk.folders()
    walk.problems.raise_all()
    refuse_unpaired(path, names)
    by_split = {name: found for name in names if (found := split_from_name(name))}
    if len({*by_split.values()}) > 1 and 2 * len(by_split) >= len(names):
        raise UsageError(
            f"holds {' and '.join(by_split)}, which are splits by their names, not classes; rename them to train, val "
            "and test, or convert each by itself with --split, and --coco FILE for COCO's annotations; "
            f"{_advise_list(path)}",
            path=path,
        )
    for file in walk.files() if len(names) == 1 else ():
        if file.path.endswith(".json"):
            refuse_coco_file(path / file.path)
    for name in names:
        if _holds_folders(walk, name) or (len(names) == 1 and split_folders(path / name)):
            raise UsageError(_NO_CLASS, path=path / name)
    files = walk.files(names[0]) if names else []
    records = [file.path for file in files if file.path.endswith((".tar", ".tfrecord", ".parquet"))]
    if records and not any(map(is_image, files)):
        advice = "put all such files into one folder, or convert each folder by itself"
        raise UsageError(
            f"holds {names[0]}/{records[0]}, so its folders are not classes; {advice}", path=path
        )
    if not names and any(map(is_image, walk.files())):
        raise _loose_images_error(path, path)
    images = FolderImages("class-folders", path, "", options)
    return Ilsvrc(by_split={split: images}) if names else None


def _loose_images_error(folder: Path, root: Path) -> UsageError:
    return UsageError(
        "holds images outside class folders, and nothing says which class they belong to; sort them into "
        f"<class>/, or, {_advise_list(folder, root)}; for images without labels, write the column file_name to "
        "metadata.csv beside them",
        path=folder,
    )


def _advise_list(*folders: Path) -> str:
    """Return the advice to convert a list, such as the tables in these folders."""
    files = sorted({file.name for folder in folders for file in folder.iterdir()})
    tables = [name for name in files if name.lower().endswith(CSV_SUFFIXES + JSON_SUFFIXES)]
    listed = "that file, with --root" if tables else "a list of paths and labels"
    return f"if {' or '.join(tables[:MAX_NAMED]) or 'another file'} has the labels, convert {listed}"


_NO_CLASS = (
    "holds folders instead of images, so it is not a class; give the folder that holds the splits (train, val, "
    "test) or the class folders, or a list of paths and labels"
)


def _holds_folders(walk: FolderWalk, folder: str) -> bool:
    return bool(walk.folders(folder)) and not any(map(is_image, walk.files(folder)))


@dataclass(frozen=True)
class FolderImages:
    """The images in ``folder`` of ``root``, in class folders or not."""

    layout: str
    root: Path
    folder: str
    options: SourceOptions

    @property
    def top(self) -> Path:
        return self.root / self.folder

    @property
    def folders(self) -> tuple[Path, ...]:
        """Absolute folders, links resolved, where any new file may become an image."""
        names = ("", *self.classes) if self.options.follow_symlinks else ()
        links = (self.top / name for name in names if (self.top / name).is_symlink())
        return (self.root.joinpath(*Path(self.folder).parts[:1]), *(link.resolve() for link in links))

    @cached_property
    def classes(self) -> Sequence[str]:
        walk = FolderWalk(self.root, self.options.follow_symlinks)
        names = walk.folders(self.folder)
        walk.problems.raise_all()
        refuse_unpaired(self.top, names)
        if len(names) == 1 and _holds_folders(walk, f"{self.folder}/{names[0]}".strip("/")):
            raise UsageError(_NO_CLASS, path=self.top / names[0])
        return names

    def list_split(self, source: Ilsvrc, split: str, known_entries: Entries | None) -> Listing:
        folder, classes, problems = self.folder, self.classes, Problems()
        walk = FolderWalk(self.root, self.options.follow_symlinks, problems)
        used = [each.top for each in source.by_split.values() if isinstance(each, FolderImages)]
        table = EntryTable(self.root, problems)
        notes = (*other_folders_note(self.root, used), *self._class_notes(source, split))
        if split == "train" and not classes and any(map(is_image, walk.files(folder))):
            raise _loose_images_error(self.top, self.root)
        if classes or split == "train":
            for file in walk.files(folder):
                if not walk.skip_non_image(file, folder):
                    loose = self.top / file.path
                    problems.add(SourceDamaged("is not in a class folder; move it into one", path=loose))
        truth = None
        if split == "val":
            truth = source.truth if classes else source.require_truth()
        for name in classes or ([] if split == "train" else [""]):
            here, cases = f"{folder}/{name}".strip("/"), problems.case_count
            label = source.labels.label_of.get(name) if name else UNLABELLED
            if label is None:
                other = f"{name} is not one of the {len(source.labels):,} classes; rename it, or move it away"
                problems.add(LabelConflict(other, path=self.root / here), "class")
                continue
            is_empty = True
            for file in walk.files_below(here) if name else walk.files(here):
                if self.options.skip_non_images and walk.skip_non_image(file, here):
                    continue
                is_empty = False
                with problems.collect("label"):
                    path, file_name = f"{name}/{file.path}".lstrip("/"), file.path.rpartition("/")[2]
                    stem = file_name.rpartition(".")[0] or file_name
                    table.append(
                        record_key(path.partition("/")[0], path),
                        truth.label_of(stem, folder=name or None) if truth else label,
                        length=file.size,
                        file=file._replace(path=f"{here}/{file.path}".lstrip("/")),
                    )
            if name and is_empty and problems.case_count == cases and source.expected_count(split) is None:
                empty = "this class has no image; add some, or remove the folder"
                problems.add(SourceDamaged(empty, path=self.root / here))
        return Listing(
            split,
            self.layout,
            table.finish(),
            source.labels,
            TreeReader(self.root, walk.follow_symlinks),
            problems=problems,
            ignored=dict(walk.ignored),
            notes=notes,
            options=self.options.kept("follow_symlinks", "skip_non_images"),
        )

    def _class_notes(self, source: Ilsvrc, split: str) -> Iterator[str]:
        """Yield notes about folders that may not be the classes, or are not in the order of their numbers."""
        names = [each.name for each in source.labels.classes]
        if split != source.splits[0] or (len(names) != 1 and official_words().keys() >= {*names}):
            return
        advice = _advise_list(self.root, self.top)
        if len(names) == 1:
            yield f"the only class is {names[0]}; {advice}"
        elif advice.endswith("--root"):
            yield f"the folders are the classes; {advice}"
        if all(map(str.isdecimal, names)) and (in_order := sorted(names, key=int)) != names:
            label = next(label for label, name in enumerate(names) if name != in_order[label])
            yield (
                f"folders are numbered as text: {names[label]} has the label {label}; to keep their numbers, convert a "
                "list of paths and labels"
            )
