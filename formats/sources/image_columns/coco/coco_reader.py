"""The reader of images and of COCO's annotations of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.schema import Field, Schema
from shardprep.formats.sources.listing.source import ByteReader, Entries
from shardprep.formats.sources.listing.tree_reader import TreeReader
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile, Identity

from .checked_objects import box_in, sides_in
from .json_objects import JsonObjects

IMAGE_LENGTH = "image_length"


def coco_schema(categories: Iterable[str]) -> Schema:
    """Return the columns of images with instances of these categories.

    For each object of an image, in the order of the file: ``boxes`` (x_min, y_min, x_max, y_max as fractions
    of the image), ``box_labels``, its category as a number of the classes of ``objects``, ``crowd``, and
    ``segmentation`` as it is in the file. ``objects`` are the categories that the image has.
    """
    return Schema(
        [
            Field("boxes", "float32[*,4]"),
            Field("box_labels", "int32[*]"),
            Field("crowd", "bool[*]"),
            Field("segmentation", "json"),
            Field("objects", "labels", tuple(categories)),
        ]
    )


class AnnotationPlaces(NamedTuple):
    """The ``offsets`` of annotations in the file, and of which image (``images``, ascending) each is."""

    images: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def of(self, image: int) -> list[int]:
        """Return the offsets of the annotations of the image at that offset, in the order of the file."""
        first, last = np.searchsorted(self.images, [image, image + 1])
        return sorted(map(int, self.offsets[first:last]))

    def only(self, images: npt.NDArray[np.int64]) -> AnnotationPlaces:
        """Return the places of these images' annotations alone."""
        wanted = np.isin(self.images, images)
        return AnnotationPlaces(self.images[wanted], self.offsets[wanted])


@dataclass
class CocoReader(ByteReader):
    """Reader of images below a folder, and of their annotations in the file at ``path``, each in its place.

    ``identity`` is that of the file when it was listed, and ``categories`` are the ids, in the order of the
    classes. An entry's offset is that of its image's object.
    """

    images: TreeReader
    path: Path
    identity: Identity
    categories: tuple[int, ...]
    places: AnnotationPlaces
    _file: ArchiveFile | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> CocoReader:
        self._file = ArchiveFile(self.path, self.identity).__enter__()
        self.images = replace(self.images)  # a copy of this reader shares its part, so that it opens another
        self.images.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.images.__exit__(kind, *rest)
        if self._file is not None:
            file, self._file = self._file, None
            file.__exit__(kind)

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def only(self, entries: Entries) -> CocoReader:
        return replace(self, places=self.places.only(entries["offset"]))

    def read(self, entry: np.void) -> bytes:
        return self.images.read(entry)

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        if self._file is None:
            raise ValueError("the reader is closed")
        objects, offset = JsonObjects(self._file, ()), int(entry["offset"])
        with foreign_file(self.path, "start again", place=lambda: f"byte {offset}: "):
            image = objects.at(offset)
            annotations = [objects.at(place) for place in self.places.of(offset)]
            values = self._values(image, annotations)
        fields = coco_schema(map(str, self.categories))
        return tuple(field.codec.encode(value) for field, value in zip(fields, values, strict=True))

    def where(self, entry: np.void) -> str:
        return self.images.where(entry)

    def _values(self, image: dict[str, Any], annotations: list[dict[str, Any]]) -> tuple[Any, ...]:
        labels = [self.categories.index(one["category_id"]) for one in annotations]
        return (
            _fractions([box_in(one) for one in annotations], *sides_in(image)),
            np.array(labels, np.int32),
            np.array([bool(one.get("iscrowd")) for one in annotations], np.bool_),
            [one.get("segmentation") for one in annotations],
            sorted(set(labels)),
        )


def _fractions(
    boxes: list[tuple[float, float, float, float]], width: int, height: int
) -> npt.NDArray[np.float32]:
    """Return boxes of pixels as x_min, y_min, x_max, y_max in fractions of the image, float32 [n, 4]."""
    pixels = np.array(boxes, np.float64).reshape(-1, 4)
    corners = np.concatenate([pixels[:, :2], pixels[:, :2] + pixels[:, 2:]], axis=1)
    return np.clip(corners / [width, height, width, height], 0, 1).astype(np.float32)
