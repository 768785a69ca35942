"""Sources derived from others: converted datasets, and a val split held out of a source with only train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import permutation
from shardprep.formats.shards.dataset import Dataset, is_collection, open_unreplaced, splits_of
from shardprep.formats.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.shards.read import Rows
from shardprep.formats.shards.tables import checked_boxes, checked_column, checked_index
from shardprep.formats.sources.source import (
    Archive,
    Entries,
    Listing,
    OpeningReader,
    Source,
    boxes_by_key,
    entry_dtype,
)

_CUSTODY = ("root", "content_root", "partial", "skipped", "plan", "source")  # kept of the original manifest


def converted_dataset(path: Path) -> ConvertedDataset | None:
    """Return the source of a dataset or a folder of its splits, else None. Raises UsageError, DataError."""
    # a collection is refused when it is read
    is_one = (path / MANIFEST_NAME).is_file() or is_collection(path)
    folders = {"": path} if is_one else splits_of(path)
    manifests = [(folder, read_manifest(folder)) for folder in folders.values()]
    found = {manifest.split: (folder, manifest) for folder, manifest in manifests}
    return ConvertedDataset(found) if found else None


@dataclass(frozen=True)
class ConvertedDataset(Source):
    """A converted dataset; ``of_split`` has the folder and manifest of each split."""

    LAYOUT = "dataset"

    of_split: Mapping[str, tuple[Path, Manifest]]

    @property
    def description(self) -> str:
        manifests = [manifest for _, manifest in self.of_split.values()]
        counts = (f"{manifest.split} of {manifest.records:,}" for manifest in manifests)
        things = "images" if all(manifest.has_images for manifest in manifests) else "records"
        names = ", ".join(dict.fromkeys(name for manifest in manifests for name in manifest.schema.names))
        return f"converted shards: {', '.join(counts)} {things}{names and f', with columns {names}'}"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(folder.resolve() for folder, _ in self.of_split.values())

    def listed(self, split: str, known: Entries | None) -> Listing:
        folder, manifest = self.of_split[split]
        index = checked_index(folder, manifest)
        entries = np.zeros(len(index), entry_dtype(index.dtype["key"].itemsize, 1))
        for column in ("key", "label", "length"):
            entries[column] = index[column]
        entries["offset"] = np.arange(len(index))
        for each in manifest.column_entries:
            lengths = checked_column(folder, manifest, each)
            entries["length"] += each.field.codec.size or 0 if lengths is None else lengths["length"]
        return Listing(
            split,
            self.LAYOUT,
            entries,
            manifest.labels,
            RecordReader(folder, manifest.root),
            archives=tuple(Archive(shard.name, shard.size, 0) for shard in manifest.shards),
            options={"dataset": {name: getattr(manifest, name) for name in _CUSTODY}},
            schema=manifest.schema,
            has_images=manifest.has_images,
        )

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        folder, manifest = self.of_split[split]
        rows = checked_boxes(folder, manifest)
        return None if rows is None else boxes_by_key(rows, checked_index(folder, manifest)["key"], labels)


@dataclass
class RecordReader(OpeningReader[Dataset]):
    """Reader of a dataset's checked images and columns; an entry's offset is its record number."""

    folder: Path
    root: str

    def opening(self) -> AbstractContextManager[Dataset]:
        return closing(open_unreplaced(self.folder, self.root))

    def read(self, entry: np.void) -> bytes:
        return self.opened[int(entry["offset"])].image

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        dataset, number = self.opened, int(entry["offset"])
        return tuple(dataset.columns.data(name, dataset.place(number)) for name in dataset.schema.names)

    def where(self, entry: np.void) -> str:
        return f"{self.folder}, record {int(entry['offset'])}"


_OTHER_STREAM = 1 << 64  # unlike for the stored order, which uses the seed alone


@dataclass(frozen=True)
class HeldOutVal(Source):
    """The images of a source with only train, divided into train and val.

    val gets ``fraction`` of each class, rounded up or down so that this is also its fraction of all images;
    at least one image of each class stays in train. The choice depends on ``seed`` and the images' keys, not
    on the order of the listing. Raises UsageError for a source with other splits.
    """

    source: Source
    fraction: float
    seed: int

    def __post_init__(self) -> None:
        if self.source.splits != ("train",):
            raise UsageError(
                f"a val fraction needs a source with only train, and this one has "
                f"{', '.join(self.source.splits)}; leave out --val-fraction, or give the folder of train"
            )

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val")

    @property
    def description(self) -> str:
        return f"{self.source.description}, {self.fraction:g} of it for val"

    @property
    def folders(self) -> tuple[Path, ...]:
        return self.source.folders

    def listed(self, split: str, known: Entries | None) -> Listing:
        whole = self._whole
        entries = whole.entries[self._is_val == (split == "val")]
        missing = 0 if whole.expected is None else whole.expected - len(whole.entries)
        return replace(
            whole,
            split=split,
            entries=entries,
            expected=len(entries) + missing if missing else None,
            ignored=whole.ignored if split == "train" else {},
            options={**whole.options, "val_fraction": self.fraction},
            kept_by=None,
        )

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        return self.source.boxes("train", labels)

    @cached_property
    def _whole(self) -> Listing:
        return self.source.survey("train")

    @cached_property
    def _is_val(self) -> npt.NDArray[np.bool_]:
        return drawn(self._whole.entries, self.fraction, self.seed)


def drawn(entries: Entries, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return for each entry whether it is drawn: every (1 / fraction)th, class after class."""
    by_key = np.argsort(entries["key"], kind="stable")
    mixed = by_key[permutation(len(entries), seed | _OTHER_STREAM)]
    by_class = mixed[np.argsort(entries["label"][mixed], kind="stable")]
    labels = entries["label"][by_class]
    chosen = np.diff(np.floor(np.arange(len(entries) + 1) * fraction + 0.5)) > 0
    chosen[:-1] &= labels[1:] == labels[:-1]
    chosen[-1:] = False
    found = np.zeros(len(entries), np.bool_)
    found[by_class[chosen]] = True
    return found
