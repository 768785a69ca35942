"""What a file of COCO's instances lists: images, and the places of their annotations."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, SourceIncomplete
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.sources.labelled_list.file_status import FileStatus, place_below
from shardprep.formats.sources.listing.entry_table import EntryTable, record_key
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import Entries
from shardprep.formats.sources.listing.tree_files import mtime_of
from shardprep.formats.sources.listing.unlisted import add_unlisted
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile, Identity

from .checked_objects import box_in, sides_in
from .coco_reader import IMAGE_LENGTH, AnnotationPlaces
from .json_objects import CocoObject, JsonObjects

PARTS = ("categories", "images", "annotations")
MAX_ID = 1 << 62


class CocoInstances:
    """The images and annotations in the file ``path``, of images below ``images``.

    After :meth:`read`, ``categories`` has the names by their ids, in ascending order of these, ``entries`` a
    row per image, with the offset of its object, and ``places`` those of the annotations.
    """

    entries: Entries
    identity: Identity
    places: AnnotationPlaces

    def __init__(self, path: Path, images: Path, *, follow_symlinks: bool) -> None:
        self.problems = Problems()
        self.categories: dict[int, str] = {}
        self._path = path
        self._images = images
        self._follow = follow_symlinks
        self._table = EntryTable(path, self.problems, [(IMAGE_LENGTH, "<i8")])
        self._ids = array("q")
        self._annotations = tuple(array("q") for _ in range(4))  # offset, size, image, category

    def read(self) -> Counter[str]:
        """Read the file whole; what cannot be used is added to the problems. Returns the files left out.

        Raises SourceDamaged, with the place, where the file is not what COCO's are.
        """
        with ArchiveFile(self._path) as file, FileStatus(self._images, follow_symlinks=self._follow) as files:
            objects = JsonObjects(file, PARTS)
            with self._at(objects):
                for one in objects:
                    with self.problems.collected(one.part), self._at(objects):
                        self._add(one, objects.offset - one.offset, files)
            self.identity = file.identity
        self.categories = dict(sorted(self.categories.items()))
        if not self.categories or len({*self.categories.values()}) < len(self.categories):
            raise SourceDamaged("has no categories, or two of one name; copy it again", path=self._path)
        self.entries = self._table.finish()
        self._place_annotations()
        advice = f"is in no object of {self._path.name}; remove it, or add one"
        listed = self.entries["path"]
        return add_unlisted(self._images, "", listed, self.problems, advice, follow_symlinks=self._follow)

    def _at(self, objects: JsonObjects) -> AbstractContextManager[None]:
        return foreign_file(self._path, "copy it again", place=lambda: f"before byte {objects.offset}: ")

    def _add(self, one: CocoObject, size: int, files: FileStatus) -> None:
        number = _id_in(one.value, "id")
        if one.part == "images":
            self._add_image(one, number, files)
        elif one.part == "annotations":
            box_in(one.value)
            image, category = _id_in(one.value, "image_id"), _id_in(one.value, "category_id")
            for column, value in zip(self._annotations, (one.offset, size, image, category), strict=True):
                column.append(value)
        else:
            name = one.value.get("name")
            if not isinstance(name, str) or not name or number in self.categories:
                raise ValueError(f"the category {number} has no name, or is there twice")
            self.categories[number] = name

    def _add_image(self, one: CocoObject, number: int, files: FileStatus) -> None:
        sides_in(one.value)
        name = one.value.get("file_name")
        if not isinstance(name, str):
            raise ValueError(f"the image {number} has no file_name")
        place = place_below(name, [self._images])
        status = files.of(place)
        if status is None:
            raise SourceIncomplete("is missing; add it", path=self._images / place)
        self._append(place, number, one.offset, status)

    def _append(self, place: str, number: int, offset: int, status: os.stat_result) -> None:
        taken = self._table.append(
            record_key("", place),
            UNLABELLED,
            length=status.st_size,
            path=place.encode(),
            offset=offset,
            mtime_ns=mtime_of(status),
            more=(status.st_size,),
        )
        if taken:
            self._ids.append(number)

    def _place_annotations(self) -> None:
        """Set the places of the annotations, by image, and count their bytes as the images'."""
        offsets, sizes, images, categories = (np.array(column, np.int64) for column in self._annotations)
        ids = np.array(self._ids, np.int64)
        by_id = np.argsort(ids, kind="stable")
        if len(ids) > 1 and (np.diff(ids[by_id]) == 0).any():
            self.problems.add(SourceDamaged("two images have one id; copy it again", path=self._path))
        at = np.minimum(np.searchsorted(ids[by_id], images), max(len(ids) - 1, 0))
        known = ids[by_id][at] == images if len(ids) else np.zeros(len(images), np.bool_)
        if not self.problems:
            self._refuse_unknown(offsets, ~known, "an image")
            self._refuse_unknown(offsets, ~np.isin(categories, [*self.categories]), "a category")
        record = by_id[at[known]]
        self.entries["length"] += np.bincount(record, sizes[known], len(ids)).astype(np.int64)
        of_image = self.entries["offset"][record]
        order = np.argsort(of_image, kind="stable")
        self.places = AnnotationPlaces(of_image[order], offsets[known][order])

    def _refuse_unknown(
        self, offsets: npt.NDArray[np.int64], unknown: npt.NDArray[np.bool_], what: str
    ) -> None:
        for offset in offsets[unknown].tolist():
            message = f"the annotation at byte {offset} is of {what} that is not there; copy it again"
            self.problems.add(SourceDamaged(message, path=self._path), what)


def _id_in(value: dict[str, Any], name: str) -> int:
    found = value.get(name)
    if type(found) is not int or not -MAX_ID < found < MAX_ID:
        raise ValueError(f"an object has no whole number as its {name}")
    return found
