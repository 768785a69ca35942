"""Summaries of a dataset and its columns, from the manifest and the index."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.images.crop_ready import read_grid
from shardprep.formats.images.header import EXTREME_ASPECT, KINDS, ImageFlag
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.shards.columns import ColumnEntry, OpenRecords
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.read import ARCHIVE_NAME, Rows


@dataclass(frozen=True)
class ColumnSummary:
    """A column: its ``name`` and ``kind``, the ``bytes`` of all values, and the ``disk_bytes`` of its files.

    ``lengths`` are (5%, median, 95%, largest) of the values' sizes in bytes, None if all are equal.
    ``classes`` is the number of its classes, 0 without any. For a label column, ``per_class`` are the fewest
    and most records of the classes that occur, and ``unlabelled`` is the number of records without a label;
    both are None for other kinds.
    """

    name: str
    kind: str
    bytes: int
    disk_bytes: int
    lengths: tuple[int, int, int, int] | None
    classes: int
    per_class: tuple[int, int] | None
    unlabelled: int | None


def _summarise_column(entry: ColumnEntry, columns: OpenRecords) -> ColumnSummary:
    field, lengths = entry.field, columns.lengths(entry.field.name)
    per_class = unlabelled = None
    if field.kind == "label":
        labels = np.clip(columns.all_values(field.name), -1, len(field.classes) - 1)
        unlabelled, *counts = np.bincount(labels + 1, minlength=len(field.classes) + 1).tolist()
        present = [count for count in counts if count]
        per_class = (min(present), max(present)) if present else None
    return ColumnSummary(
        name=field.name,
        kind=field.kind,
        bytes=int(lengths.sum(dtype=np.int64)),
        disk_bytes=sum(file.size for file in entry.files),
        lengths=None if field.is_fixed else percentiles(lengths),
        classes=len(field.classes),
        per_class=per_class,
        unlabelled=unlabelled,
    )


def percentiles(column: np.ndarray[Any, Any]) -> tuple[int, int, int, int]:
    """Return the 5th, 50th and 95th percentiles, and the largest value."""
    low, middle, high, largest = np.percentile(column, [5, 50, 95, 100])
    return int(low), int(middle), int(high), int(largest)


SAMPLED = 64  # crop-ready images whose segments are measured


@dataclass(frozen=True)
class CropReadySummary:
    """The crop-ready images of a dataset.

    ``images`` is their number, and ``others`` the number of other images by kind. ``segment_bytes`` is the
    median size of a segment, and ``segment_pixels`` the median width and height, both of a sample.
    ``transcoder`` is the program and version that encoded them, None if they were copied from an earlier
    dataset. ``shorter_side``, in pixels, and ``quality`` are those of lossy shrinking, or None.
    """

    images: int
    others: dict[str, int]
    segment_bytes: int
    segment_pixels: tuple[int, int]
    transcoder: str | None
    shorter_side: int | None
    quality: int | None


@dataclass(frozen=True)
class Summary:
    """The summary of a dataset.

    ``split``, ``records``, ``image_bytes``, ``container``, ``class_sorted``, ``partial``, ``skipped``,
    ``content_root``, ``root``, ``has_images`` and ``archive_md5`` are as in :class:`.Manifest`.

    Attributes:
        path: Its folder.
        classes: Number of classes in the label space.
        classes_present: Number of classes with images.
        per_class: The fewest and most images of any class present.
        disk_bytes: Total size of the files.
        archive: Path of the archive with the images; None if they are in the shards.
        shards: Number of shards.
        order: Order of the plan.
        seed: Seed of the plan.
        boxes: Number of boxes.
        source: Layout of the source.
        images: Maps "width", "height" (pixels) and "length" (bytes) to (5%, median, 95%, largest); empty
            without images.
        kinds: Number of images by file kind, such as "JPEG".
        oddities: Number of unusual images by property.
        crop_ready: Summary of the crop-ready images, or None.
        columns: A summary for each column.
    """

    path: str
    split: str
    records: int
    classes: int
    classes_present: int
    per_class: tuple[int, int]
    image_bytes: int
    disk_bytes: int
    container: str
    archive: str | None
    shards: int
    order: str
    seed: int
    class_sorted: bool
    partial: bool
    skipped: int
    boxes: int
    source: str
    images: dict[str, tuple[int, int, int, int]]
    kinds: dict[str, int]
    oddities: dict[str, int]
    crop_ready: CropReadySummary | None
    content_root: str
    root: str
    has_images: bool = True
    columns: tuple[ColumnSummary, ...] = ()
    archive_md5: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = f"{count_of(self.records, 'record')}, {count_of(self.classes, 'class')}, {count_of(self.shards, f'{self.container} shard')}"
        return f"<Summary of {self.path!r}: {self.split}, {size}>"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_MANIFEST_FIELDS = (
    "split", "image_bytes", "container", "class_sorted", "partial", "skipped", "content_root", "root", "has_images",
    "archive_md5",
)  # fmt: skip
"""The attributes of a summary that are copied from the manifest."""


def inspect(dataset: Dataset | str | os.PathLike[str]) -> Summary:
    """Return the summary of ``dataset``, a folder or an opened :class:`Dataset`.

    Reads the column tables, and no shards except for a sample of crop-ready images. Raises the errors of
    :func:`open_dataset`.
    """
    if not isinstance(dataset, Dataset):
        with Dataset(dataset) as opened:
            return inspect(opened)
    manifest, index = dataset.manifest, dataset.index
    present, counts = np.unique(index["label"], return_counts=True)
    if present[-1] >= 0:  # otherwise no record has a label
        present, counts = present[present >= 0], counts[present >= 0]
    boxes = manifest.table("boxes.npy")
    images = index if manifest.has_images else index[:0]
    return Summary(
        path=dataset.location,
        **{name: getattr(manifest, name) for name in _MANIFEST_FIELDS},
        records=len(index),
        classes=len(manifest.labels),
        classes_present=int(np.count_nonzero(present >= 0)),
        per_class=(int(counts.min()), int(counts.max())),
        disk_bytes=sum(f.size for f in manifest.files),
        archive=os.path.realpath(dataset.path / ARCHIVE_NAME) if manifest.archive else None,
        shards=len(manifest.shards),
        order=manifest.plan["order"],
        seed=manifest.plan["seed"],
        boxes=boxes.records if boxes else 0,
        source=manifest.source["layout"],
        images={name: percentiles(images[name]) for name in ("width", "height", "length") if len(images)},
        kinds=_count_kinds(images),
        oddities={
            _ODDITY_TITLES.get(name, name): int(np.count_nonzero(mask))
            for name, mask in (oddities(images) if len(images) else {}).items()
        },
        crop_ready=_summarise_crop_ready(dataset),
        columns=tuple(_summarise_column(entry, dataset.columns) for entry in manifest.column_entries),
    )


def _count_kinds(index: np.ndarray[Any, Any]) -> dict[str, int]:
    kinds, counts = np.unique(index["flags"] & sum(KINDS.values()), return_counts=True)
    by_flag = dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    return {name: by_flag[flag] for name, flag in KINDS.items() if flag in by_flag}


TINY = 32  # pixels of the shorter side
_ODDITY_TITLES = {"tiny": f"under {TINY} pixels", "extreme aspect": f"over {EXTREME_ASPECT}:1"}


def oddities(index: Rows) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which images are unusual, by oddity; an image may have several."""
    flags, components = index["flags"], index["components"]
    width, height = index["width"].astype(np.int64), index["height"].astype(np.int64)
    is_jpeg = flags & sum(KINDS.values()) == 0
    return {
        "progressive": (flags & ImageFlag.PROGRESSIVE) != 0,
        "grayscale": components <= 2,
        "CMYK": (components == 4) & is_jpeg,
        "EXIF orientation": index["orientation"] != 1,
        "corrupt EXIF": (flags & ImageFlag.CORRUPT_EXIF) != 0,
        "several frames": (flags & ImageFlag.SEVERAL) != 0,
        "trailing bytes": (flags & ImageFlag.TRAILING_BYTES) != 0,
        "tiny": np.minimum(width, height) < TINY,
        "extreme aspect": np.maximum(width, height) > EXTREME_ASPECT * np.minimum(width, height),
    }


def _summarise_crop_ready(dataset: Dataset) -> CropReadySummary | None:
    ready = np.flatnonzero(dataset.index["flags"] & ImageFlag.CROP_READY)
    if not len(ready):
        return None
    sample = ready[np.linspace(0, len(ready) - 1, min(len(ready), SAMPLED), dtype=np.int64)]
    grids = [grid for number in sample if (grid := read_grid(dataset[int(number)].image))]
    if not grids:
        raise ManifestDamaged("the index marks images as crop-ready that are not", path=dataset.path)
    lengths = np.concatenate([grid.lengths for grid in grids])
    sides = np.array([(grid.interval * grid.mcu_width, grid.mcu_height) for grid in grids])
    width, height = np.median(sides, axis=0).astype(int).tolist()
    plan = dataset.manifest.plan
    return CropReadySummary(
        images=len(ready),
        others=_count_kinds(np.delete(dataset.index, ready)),
        segment_bytes=int(np.median(lengths)),
        segment_pixels=(width, height),
        transcoder=plan.get("transcoder"),
        shorter_side=plan.get("shorter_side"),
        quality=plan.get("quality"),
    )


@dataclass(frozen=True)
class ClassCount:
    """A class: its label, name (for ImageNet, the wnid), words (None if unknown) and number of images."""

    label: int
    name: str
    words: str | None
    images: int


def class_counts(dataset: Dataset) -> list[ClassCount]:
    """Return all classes of ``dataset`` in label order, including those without images."""
    labels = dataset.index["label"]
    images = np.bincount(labels[labels >= 0], minlength=len(dataset.manifest.labels)).tolist()
    classes = dataset.manifest.labels.classes
    return [ClassCount(i, c.name, c.words, n) for i, (c, n) in enumerate(zip(classes, images, strict=True))]
