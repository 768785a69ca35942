"""The source of a converted dataset: its records, to be stored in another container, order or coding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.dataset.dataset import Dataset, open_unreplaced
from shardprep.formats.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.dataset.splits import splits_of
from shardprep.formats.dataset.table_checks import checked_boxes, checked_column, checked_index
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.sources.listing.source import (
    Archive,
    Box,
    ByteReader,
    Entries,
    Listing,
    Source,
    entry_dtype,
    no_such_split,
)

LAYOUT = "dataset"


def converted_dataset(path: Path) -> ConvertedDataset | None:
    """Return the source of a dataset, or of a folder of splits; None for anything else. Raises DataError."""
    folders = {"": path} if (path / MANIFEST_NAME).is_file() else splits_of(path)
    found = {manifest.split: (folder, manifest) for folder, manifest in _manifests(folders)}
    return ConvertedDataset(found) if found else None


def _manifests(folders: Mapping[str, Path]) -> Iterator[tuple[Path, Manifest]]:
    return ((folder, read_manifest(folder)) for folder in folders.values())


@dataclass(frozen=True)
class ConvertedDataset(Source):
    """The dataset of each split: its folder and manifest."""

    members: Mapping[str, tuple[Path, Manifest]]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.members)

    @property
    def description(self) -> str:
        manifests = [manifest for _, manifest in self.members.values()]
        counts = (f"{manifest.split} of {manifest.records:,}" for manifest in manifests)
        things = "images" if all(manifest.has_images for manifest in manifests) else "records"
        names = ", ".join(dict.fromkeys(name for manifest in manifests for name in manifest.schema.names))
        return f"converted shards: {', '.join(counts)} {things}{names and f', with columns {names}'}"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(folder.resolve() for folder, _ in self.members.values())

    def survey(self, split: str) -> Listing:
        folder, manifest = self._member(split)
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=_entries(folder, manifest),
            labels=manifest.labels,
            reader=RecordReader(folder, manifest.root),
            archives=tuple(Archive(shard.name, shard.size, 0) for shard in manifest.shards),
            options={"dataset": _custody(manifest)},
            schema=manifest.schema,
            has_images=manifest.has_images,
        )

    def boxes(self, split: str) -> Iterator[Box] | None:
        folder, manifest = self._member(split)
        rows = checked_boxes(folder, manifest)
        if rows is None:
            return None
        keys = checked_index(folder, manifest)["key"]
        return _boxes(rows[np.argsort(keys[rows["record"]], kind="stable")], keys, manifest)

    def _member(self, split: str) -> tuple[Path, Manifest]:
        if split not in self.members:
            raise no_such_split(split, self.splits)
        return self.members[split]


def _custody(manifest: Manifest) -> dict[str, Any]:
    """Return what a dataset keeps of the one that it was made from."""
    return {
        "root": manifest.root,
        "content_root": manifest.content_root,
        "partial": manifest.partial,
        "skipped": manifest.skipped,
        "plan": manifest.plan,
        "source": manifest.source,
    }


def _entries(folder: Path, manifest: Manifest) -> Entries:
    """Return a row per record; its offset is the record's number, its length that of image and columns."""
    index = checked_index(folder, manifest)
    entries = np.zeros(len(index), entry_dtype(index.dtype["key"].itemsize, 1))
    for column in ("key", "label", "length"):
        entries[column] = index[column]
    entries["offset"] = np.arange(len(index))
    for each in manifest.columns.entries if manifest.columns else ():
        lengths = checked_column(folder, manifest, each)
        entries["length"] += each.field.codec.size or 0 if lengths is None else lengths["length"]
    return entries


def _boxes(rows: Entries, keys: Entries, manifest: Manifest) -> Iterator[Box]:
    names = [each.name for each in manifest.labels.classes]
    for record, label, *sides in rows.tolist():
        name = "" if label == UNLABELLED else names[label]
        yield Box(keys[record].decode(), name, *sides)


class RecordReader(ByteReader):
    """Reader of the images and columns of a dataset, each checked against its checksum."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder = folder
        self._root = root
        self._dataset: Dataset | None = None

    def __enter__(self) -> RecordReader:
        self._dataset = open_unreplaced(self._folder, self._root)
        return self

    def __exit__(self, *exc: object) -> None:
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            dataset.close()

    @property
    def is_open(self) -> bool:
        return self._dataset is not None

    def read(self, entry: np.void) -> bytes:
        return self._opened[int(entry["offset"])].image

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        dataset, number = self._opened, int(entry["offset"])
        return tuple(dataset.columns[name].data(dataset.place(number)) for name in dataset.schema.names)

    @property
    def _opened(self) -> Dataset:
        if self._dataset is None:
            raise ValueError("the reader is closed")
        return self._dataset

    def where(self, entry: np.void) -> str:
        return f"{self._folder}, record {int(entry['offset'])}"
