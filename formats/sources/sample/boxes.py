"""The bounding boxes of a sample: a few annotations, with the defects of the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, cycle
from typing import IO

import numpy as np

from shardprep.formats.images.header import read_image_header

from .archives import add_member, tar_gz
from .images import Album
from .plan import RandomUse, SampleImage, SamplePlan


class BoxDefect(StrEnum):
    """A defect, or an unusual property, of an annotation."""

    NONE = "none"
    DISPLAYED_SIZE = "displayed size differs from the image's"
    SWAPPED = "xmin and xmax swapped"
    OUTSIDE = "reaches out of the image"
    FAR_OUTSIDE = "wholly out of the image"
    FLOAT = "fractions of pixels"
    PERCENT_S = "filename is %s"
    TWO_OBJECTS = "two objects"


ANNOTATIONS = 2 * len(BoxDefect)  # per archive, if there are as many images


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box in pixels of the displayed size, as in the XML: numbers in any order and form."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float


def annotated(images: list[SampleImage]) -> list[tuple[SampleImage, BoxDefect]]:
    """Return the images that get an annotation, spread evenly, each with its defect."""
    step = max(1, len(images) // ANNOTATIONS)
    return list(zip(images[::step][:ANNOTATIONS], cycle(BoxDefect), strict=False))


def annotated_train(plan: SamplePlan) -> list[tuple[SampleImage, BoxDefect]]:
    """Return the annotated images of train."""
    return annotated(list(chain.from_iterable(plan.train_images(i) for i in range(plan.classes))))


def annotated_val(plan: SamplePlan) -> list[tuple[SampleImage, BoxDefect]]:
    """Return the annotated images of val."""
    return annotated(list(plan.val_images()))


def write_train_boxes(file: IO[bytes], plan: SamplePlan, album: Album) -> None:
    """Write ``<wnid>/<wnid>_<number>.xml`` for each annotated image."""
    with tar_gz(file) as tar:
        for image, defect in annotated_train(plan):
            add_member(tar, f"{image.key}.xml", annotation(image, defect, plan, album).encode())


def write_val_boxes(file: IO[bytes], plan: SamplePlan, album: Album) -> None:
    """Write ``val/ILSVRC2012_val_<number>.xml`` for each annotated image."""
    with tar_gz(file) as tar:
        for image, defect in annotated_val(plan):
            add_member(tar, f"val/{image.key}.xml", annotation(image, defect, plan, album).encode())


def annotation(image: SampleImage, defect: BoxDefect, plan: SamplePlan, album: Album) -> str:
    """Return the XML of one image."""
    wnid = plan.wnids[image.label]
    folder, name = wnid if "/" in image.key else "val", image.key.rpartition("/")[2]
    header = read_image_header(album.draw(image))
    width, height = header.width, header.height
    if defect is BoxDefect.DISPLAYED_SIZE:
        width, height = width * 3 // 2, height * 3 // 2
    rng = np.random.default_rng((*image.seed, RandomUse.BOXES))
    objects = "".join(_object(wnid, box) for box in _rectangles(defect, width, height, rng))
    return f"""\
<annotation>
	<folder>{folder}</folder>
	<filename>{"%s" if defect is BoxDefect.PERCENT_S else name}</filename>
	<source>
		<database>ILSVRC_2012</database>
	</source>
	<size>
		<width>{width}</width>
		<height>{height}</height>
		<depth>3</depth>
	</size>
	<segmented>0</segmented>
{objects}</annotation>
"""


def _object(wnid: str, box: Rectangle) -> str:
    return f"""\
	<object>
		<name>{wnid}</name>
		<pose>Unspecified</pose>
		<truncated>0</truncated>
		<difficult>0</difficult>
		<bndbox>
			<xmin>{box.xmin}</xmin>
			<ymin>{box.ymin}</ymin>
			<xmax>{box.xmax}</xmax>
			<ymax>{box.ymax}</ymax>
		</bndbox>
	</object>
"""


def _rectangles(defect: BoxDefect, width: int, height: int, rng: np.random.Generator) -> Iterator[Rectangle]:
    left, top = int(rng.integers(width // 3)), int(rng.integers(height // 3))
    right, bottom = width - 1 - int(rng.integers(width // 3)), height - 1 - int(rng.integers(height // 3))
    if defect is BoxDefect.SWAPPED:
        left, right = right, left
    if defect is BoxDefect.FAR_OUTSIDE:
        left = width + 5
    if defect in (BoxDefect.OUTSIDE, BoxDefect.FAR_OUTSIDE):
        right = width + 40
    offset = 0.25 if defect is BoxDefect.FLOAT else 0
    yield Rectangle(left + offset, top + offset, right + offset, bottom + offset)
    if defect is BoxDefect.TWO_OBJECTS:
        yield Rectangle(0, 0, width // 2, height // 2)
