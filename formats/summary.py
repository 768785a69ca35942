"""What a dataset is, summed up from its manifest and its index."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dataset import Dataset
from .image_header import ImageFlag


@dataclass(frozen=True)
class Summary:
    """Figures for people and machines; ``images`` maps a figure's name to (5 %, median, 95 %, largest)."""

    path: str
    split: str
    records: int
    classes: int
    classes_present: int
    per_class: tuple[int, int]
    image_bytes: int
    disk_bytes: int
    container: str
    shards: int
    order: str
    seed: int
    class_sorted: bool
    partial: bool
    skipped: int
    boxes: int
    source: str
    images: dict[str, tuple[int, int, int, int]]
    oddities: dict[str, int]
    content_root: str
    root: str

    def to_json(self) -> dict[str, Any]:
        """The summary for machines."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def summarise(dataset: Dataset) -> Summary:
    """Reads the index only, no shard."""
    manifest, index = dataset.manifest, dataset.index
    counts = np.unique(index["label"], return_counts=True)[1]
    boxes = manifest.table("boxes.npy")
    return Summary(
        path=os.fspath(dataset.path),
        split=manifest.split,
        records=len(index),
        classes=len(manifest.labels),
        classes_present=int(np.count_nonzero(np.unique(index["label"]) >= 0)),
        per_class=(int(counts.min()), int(counts.max())),
        image_bytes=manifest.image_bytes,
        disk_bytes=sum(f.size for f in manifest.files),
        container=manifest.container,
        shards=len(manifest.shards),
        order=manifest.plan["order"],
        seed=manifest.plan["seed"],
        class_sorted=manifest.class_sorted,
        partial=manifest.partial,
        skipped=manifest.skipped,
        boxes=boxes.records if boxes else 0,
        source=manifest.source["layout"],
        images={name: _spread(index[name]) for name in ("width", "height", "length")},
        oddities=_oddities(index),
        content_root=manifest.content_root,
        root=manifest.root,
    )


def _spread(column: np.ndarray[Any, Any]) -> tuple[int, int, int, int]:
    low, middle, high, largest = np.percentile(column, [5, 50, 95, 100])
    return int(low), int(middle), int(high), int(largest)


def _oddities(index: np.ndarray[Any, Any]) -> dict[str, int]:
    """How many images are peculiar in each way; none of the ways exclude another."""
    flags, components = index["flags"], index["components"]
    png = (flags & ImageFlag.PNG) != 0
    counts = {
        "PNG": png,
        "progressive": (flags & ImageFlag.PROGRESSIVE) != 0,
        "grayscale": components <= 2,
        "CMYK": (components == 4) & ~png,
        "EXIF orientation": index["orientation"] != 1,
        "corrupt EXIF": (flags & ImageFlag.CORRUPT_EXIF) != 0,
        "trailing bytes": (flags & ImageFlag.TRAILING_BYTES) != 0,
        "under 32 pixels": (index["width"] < 32) | (index["height"] < 32),
    }
    return {name: int(np.count_nonzero(found)) for name, found in counts.items()}
