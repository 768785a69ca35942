"""The source of official archives, read in place: a tar of class tars, and flat tars of val and test."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardprep.formats.errors import LabelConflict, SourceDamaged
from shardprep.formats.records.canonical_json import sha256_of
from shardprep.formats.records.labels import UNLABELLED, LabelSpace, official_words
from shardprep.formats.sources.annotations.annotation_files import AnnotationFiles
from shardprep.formats.sources.listing.entry_table import EntryTable, record_key
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import SPLITS, Entries, Listing
from shardprep.formats.sources.tar.reader import TarReader
from shardprep.formats.sources.tar.walk import Member, walk
from shardprep.formats.system.regular_file import ArchiveFile

from .ilsvrc_source import Found, IlsvrcSource

ARCHIVES = {  # the patched test images are preferred to those of 2012
    "train": ("ILSVRC2012_img_train.tar",),
    "val": ("ILSVRC2012_img_val.tar",),
    "test": ("ILSVRC2012_img_test_v10102019.tar", "ILSVRC2012_img_test*.tar"),
}
_MEMBERS = {
    "train": re.compile(r"(n\d{8})\.tar", re.ASCII),
    "val": re.compile(r"(ILSVRC2012_val_\d{8})\.(?:JPEG|jpeg|jpg)", re.ASCII),
    "test": re.compile(r"(?:test/)?(ILSVRC2012_test_\d{8})\.(?:JPEG|jpeg|jpg)", re.ASCII),
}
_TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.(?:JPEG|jpeg|jpg)", re.ASCII)


def official_tars(folder: Path, *, check_md5: bool = False) -> OfficialTars | None:
    """Return the source of the archives in a folder with official names; None if there are none."""
    globbed = {
        split: [p for name in names for p in sorted(folder.glob(name))] for split, names in ARCHIVES.items()
    }
    return _source({split: paths[0] for split, paths in globbed.items() if paths}, folder, check_md5)


def single_tar(path: Path, *, check_md5: bool = False) -> OfficialTars | None:
    """Return the source of one archive; its first member decides the split. None for any other archive."""
    with ArchiveFile(path) as archive:
        first = next(walk(archive.read_at, archive=str(path), end=archive.end), None)
    splits = [split for split, names in _MEMBERS.items() if first and names.fullmatch(first.name)]
    return _source(dict.fromkeys(splits, path), path.parent, check_md5)


def _source(paths: Mapping[str, Path], folder: Path, check_md5: bool) -> OfficialTars | None:
    if not paths:
        return None
    return OfficialTars(
        layout="official-tars",
        paths=paths,
        annotation_files=AnnotationFiles.beside(folder),
        beside=(folder,),
        check_md5=check_md5,
        official_packing=True,
    )


@dataclass(frozen=True, kw_only=True)
class OfficialTars(IlsvrcSource):
    """A source of archives; ``paths`` has the archive of each split, ``known`` the entries that are known."""

    paths: Mapping[str, Path]
    known: Mapping[str, Entries] = field(default_factory=dict, compare=False, repr=False)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in self.paths)

    @cached_property
    def labels(self) -> LabelSpace:
        if self.annotation_files.space is not None:
            return self.annotation_files.space
        wnids: set[str] = set()
        if "train" in self.paths:
            with ArchiveFile(self.paths["train"]) as archive:
                wnids = {wnid for wnid, _ in _members(archive, "train")}
        return LabelSpace.of(official_words() if wnids <= official_words().keys() else wnids)

    def known_by(self, split: str) -> Mapping[str, Any]:
        path = self.paths[split].resolve()
        status = path.stat()
        truth = self.ground_truth(flat=True).authorities if split == "val" else ()
        return {
            "archive": os.fsencode(path).hex(),
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "split": split,
            "classes": self.labels.digest,
            "truth": sha256_of([[each.name, dict(each.labels)] for each in truth]),
        }

    def survey_of(self, split: str, entries: Entries) -> Listing:
        return replace(self, known={split: entries}).survey(split)

    def find(self, split: str, problems: Problems) -> Found:
        path = self.paths[split]
        with ArchiveFile(path) as archive:
            entries = self.known.get(split)
            if entries is None:
                entries = self._listed(archive, split, problems)
        return Found(entries, TarReader(path, archive.identity), (path,))

    def _listed(self, archive: ArchiveFile, split: str, problems: Problems) -> Entries:
        table = EntryTable(archive.path, problems)
        archive.expect_random_reads()
        if split == "train":
            self._list_classes(archive, table)
        else:
            _list_images(archive, split, table, self._label_of(split))
        return table.finish()

    def _list_classes(self, archive: ArchiveFile, table: EntryTable) -> None:
        for wnid, member in _members(archive, "train"):
            if wnid not in self.labels.label_of:
                raise LabelConflict(
                    f"the class {wnid} is none of the devkit's; use the devkit of these images",
                    path=archive.path,
                )
            _list_class(archive, wnid, member, table, self.labels.label_of[wnid])

    def _label_of(self, split: str) -> Callable[[str], int]:
        return self.ground_truth(flat=True).label_of if split == "val" else lambda image: UNLABELLED


def _list_class(archive: ArchiveFile, wnid: str, tar: Member, table: EntryTable, label: int) -> None:
    place = f"{archive.path}: {tar.name}"
    for image in walk(archive.read_at, archive=place, start=tar.offset, end=tar.offset + tar.size):
        match = _TRAIN_IMAGE.fullmatch(image.name)
        if match is None or match[1] != wnid:
            raise _unexpected(image, place)
        key = record_key(wnid, f"{wnid}/{image.name}")
        table.append(key, label, length=image.size, offset=image.offset)


def _list_images(archive: ArchiveFile, split: str, table: EntryTable, label_of: Callable[[str], int]) -> None:
    for key, image in _members(archive, split):
        table.append(key, label_of(key), length=image.size, offset=image.offset)


def _members(archive: ArchiveFile, split: str) -> Iterator[tuple[str, Member]]:
    """Yield the members, each with the wnid or image in its name."""
    for member in walk(archive.read_at, archive=str(archive.path), end=archive.end):
        match = _MEMBERS[split].fullmatch(member.name)
        if match is None:
            raise _unexpected(member, str(archive.path))
        yield match[1], member


def _unexpected(member: Member, place: str) -> SourceDamaged:
    return SourceDamaged(
        f"at byte {member.offset}: {member.name!r} does not belong here; use the official archive", path=place
    )
