"""The data that all contenders read: files, shards and the peers' own files of the same images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardprep.formats import PlanOptions, convert, open_dataset

SHARD_BYTES = 64 << 20  # several shards, as in real datasets
SHORTER_SIDE = 256  # pixels, of the smaller images


@dataclass(frozen=True)
class Data:
    """The images in class folders, ``scratch`` for files made of them, and the settings of all rates."""

    images: Path
    scratch: Path
    size: int = 224
    batch: int = 256
    workers: int = 2

    @property
    def lmdb(self) -> Path:
        return self.scratch / "lmdb"

    @property
    def hdf5(self) -> Path:
        return self.scratch / "hdf5"

    @property
    def crop_ready(self) -> Path:
        return self.scratch / "crop-ready"

    @property
    def small(self) -> Path:
        return self.scratch / "small"

    @property
    def tfrecord(self) -> Path:
        return self.scratch / "images.tfrecord"

    @property
    def tfrecord_small(self) -> Path:
        return self.scratch / "small.tfrecord"

    @property
    def beton(self) -> Path:
        return self.scratch / "images.beton"

    @property
    def beton_small(self) -> Path:
        return self.scratch / "small.beton"

    def files(self) -> list[tuple[Path, int]]:
        """Every image and its label."""
        classes = sorted(path for path in self.images.iterdir() if path.is_dir())
        return [
            (file, label) for label, folder in enumerate(classes) for file in sorted(folder.glob("*.jpg"))
        ]


def prepare(data: Data) -> int:
    """Convert what is missing and read everything once; return the mean size of an image in bytes."""
    ways = {
        data.lmdb: PlanOptions(shard_size=SHARD_BYTES),
        data.hdf5: PlanOptions(container="hdf5", shard_size=SHARD_BYTES),
        data.crop_ready: PlanOptions(shard_size=SHARD_BYTES, crop_ready=True),
    }
    for folder, options in ways.items():
        _convert(data, folder, options)
    warm([path for path, _ in data.files()])
    for folder in ways:
        warm(sorted(folder.iterdir()))
    with open_dataset(data.lmdb) as dataset:
        return dataset.manifest.image_bytes // len(dataset)


def prepare_small(data: Data) -> None:
    """Convert the images to shards of smaller ones, if these are missing, and read them once."""
    _convert(
        data, data.small, PlanOptions(shard_size=SHARD_BYTES, crop_ready=True, shorter_side=SHORTER_SIDE)
    )
    warm(sorted(data.small.iterdir()))


def _convert(data: Data, folder: Path, options: PlanOptions) -> None:
    if not (folder / "manifest.json").exists():
        convert(data.images, folder, split="train", plan_options=options)


def warm(paths: list[Path]) -> None:
    """Read the files into the page cache."""
    for path in paths:
        path.read_bytes()
