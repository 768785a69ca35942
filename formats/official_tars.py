"""The official archives, read in place: a tar of class tars, and flat tars of val and test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .archive_file import ArchiveFile
from .entry_table import EntryTable
from .errors import LabelConflict, SourceDamaged
from .evidence import Evidence
from .keys import record_key
from .labels import UNLABELLED, LabelSpace, official_words
from .recognised_source import Found, RecognisedSource
from .source import SPLITS
from .tar_reader import TarReader
from .tar_walk import Member, walk

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
    """The archives that a folder holds under their official names; None where there are none."""
    globbed = {
        split: [p for name in names for p in sorted(folder.glob(name))] for split, names in ARCHIVES.items()
    }
    return _source({split: paths[0] for split, paths in globbed.items() if paths}, folder, check_md5)


def single_tar(path: Path, *, check_md5: bool = False) -> OfficialTars | None:
    """One archive; its split is told by its first member, None where that is of no split."""
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
        evidence=Evidence.beside(folder),
        beside=(folder,),
        check_md5=check_md5,
        official_packing=True,
    )


@dataclass(frozen=True, kw_only=True)
class OfficialTars(RecognisedSource):
    """``paths`` has the archive of each split."""

    paths: Mapping[str, Path]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in self.paths)

    @cached_property
    def labels(self) -> LabelSpace:
        if self.evidence.space is not None:
            return self.evidence.space
        wnids: set[str] = set()
        if "train" in self.paths:
            with ArchiveFile(self.paths["train"]) as archive:
                wnids = {wnid for wnid, _ in _members(archive, "train")}
        return LabelSpace.of(official_words() if wnids <= official_words().keys() else wnids)

    def find(self, split: str) -> Found:
        path = self.paths[split]
        table = EntryTable(path)
        with ArchiveFile(path) as archive:
            archive.expect_random_reads()
            if split == "train":
                self._list_classes(archive, table)
            else:
                _list_images(archive, split, table, self._label_of(split))
        return Found(table.finish(), TarReader(path, archive.identity), (path,))

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
    """The members with the wnid or image that they are named for."""
    for member in walk(archive.read_at, archive=str(archive.path), end=archive.end):
        match = _MEMBERS[split].fullmatch(member.name)
        if match is None:
            raise _unexpected(member, str(archive.path))
        yield match[1], member


def _unexpected(member: Member, place: str) -> SourceDamaged:
    return SourceDamaged(
        f"at byte {member.offset}: {member.name!r} does not belong here; use the official archive", path=place
    )
