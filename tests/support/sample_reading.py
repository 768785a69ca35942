"""A sample for tests, read back by other means than the package's."""

import io
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import scipy.io

from shardprep.formats.sources.sample import SampleSummary, make_sample

TRAIN, VAL, TEST = (f"ILSVRC2012_img_{split}.tar" for split in ("train", "val", "test"))
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
TRAIN_BOXES, VAL_BOXES = "ILSVRC2012_bbox_train_v2.tar.gz", "ILSVRC2012_bbox_val_v3.tgz"
COUNTS = {"classes": 10, "train_per_class": 8, "val": 30, "test": 7}


@dataclass(frozen=True)
class Sample:
    """A sample of ``COUNTS`` on the disk, and its contents by record key."""

    folder: Path
    summary: SampleSummary

    @classmethod
    def make(cls, folder: Path) -> "Sample":
        return cls(folder, make_sample(folder, **COUNTS))

    @cached_property
    def train(self) -> dict[str, bytes]:
        return {
            f"{wnid.removesuffix('.tar')}/{name.removesuffix('.JPEG')}": image
            for wnid, tar in members(self.folder / TRAIN).items()
            for name, image in members(tar).items()
        }

    @cached_property
    def val(self) -> dict[str, bytes]:
        return {name.removesuffix(".JPEG"): image for name, image in members(self.folder / VAL).items()}

    @property
    def synsets(self) -> list[tuple[Any, ...]]:
        mat = members(self.folder / DEVKIT)["ILSVRC2012_devkit_t12/data/meta.mat"]
        rows: list[tuple[Any, ...]] = scipy.io.loadmat(io.BytesIO(mat), squeeze_me=True)["synsets"].tolist()
        return rows

    @property
    def wnid_of_val(self) -> dict[str, str]:
        """Each val image's class, from the ground truth."""
        return {
            f"ILSVRC2012_val_{number:08d}": self.summary.wnids[identifier - 1]
            for number, identifier in enumerate(ground_truth(self.folder), start=1)
        }


def ground_truth(folder: Path) -> list[int]:
    text = members(folder / DEVKIT)["ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"]
    return [int(line) for line in text.split()]


def members(archive: Path | bytes) -> dict[str, bytes]:
    file = io.BytesIO(archive if isinstance(archive, bytes) else archive.read_bytes())
    with tarfile.open(fileobj=file) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decode(image: bytes, flags: int = cv2.IMREAD_COLOR) -> npt.NDArray[np.uint8]:
    return np.asarray(cv2.imdecode(np.frombuffer(image, np.uint8), flags), np.uint8)
