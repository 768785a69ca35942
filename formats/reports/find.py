"""Finds pictures in a dataset: the same bytes, or similar images."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, DataError, UsageError
from shardprep.formats.images.crop_ready import read_grid
from shardprep.formats.images.decode import cv2
from shardprep.formats.images.header import ImageFlag, read_image_header
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.reports.duplicates import DISTANCE
from shardprep.formats.reports.pixels import CODES, ImageReading, measure, perceptual_hash
from shardprep.formats.runtime.files import name_in_os_errors, open_regular, save_bytes
from shardprep.formats.runtime.progress import Progress, check_flags
from shardprep.formats.runtime.user_paths import user_path, user_paths
from shardprep.formats.shards.dataset import Dataset

HASHES = "shardprep hashes 1"
MAX_SIDE_SHIFT = 1  # pixels, as shrinking rounds a side


@dataclass(frozen=True)
class ImageMatch:
    """A record that shows a picture.

    Attributes:
        image: The picture's file.
        record: The record's number.
        key: The record's key.
        label: Its label in the dataset's label space.
        class_name: The name of its class, None without a label.
        distance: Number of bits in which the perceptual hashes differ in the best of eight orientations; None
            if the bytes are equal, or if a conversion made one of the two from the other.
    """

    image: str
    record: int
    key: str
    label: int
    class_name: str | None
    distance: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return asdict(self)


def _original_digest(_row: np.void | None, image: bytes) -> bytes:
    grid = read_grid(image)
    return grid.sha256 if grid else hashlib.sha256(image).digest()


@dataclass(frozen=True)
class _Picture:
    """A picture to find; ``digests`` are those of its bytes and, if it is crop-ready, of its original.

    ``hashes`` are those of its eight orientations, if it is to be found by appearance.
    """

    path: str
    size: int
    sides: tuple[int, int]
    digests: frozenset[bytes]
    hashes: tuple[int, ...]


def find(
    dataset: str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str]],
    *,
    near: bool = False,
    hashes: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[ImageMatch]:
    """Find the records that show these pictures.

    By default, a record matches if it has the same bytes, is a crop-ready or shrunk version of the picture,
    or is its original. Only records of matching sizes are read. The result does not depend on ``workers``.

    Args:
        dataset: The dataset's folder.
        images: Files of the pictures.
        near: Whether to also find images whose perceptual hashes differ in at most 4 of 64 bits: scaled or
            compressed again, turned by 90 degrees or mirrored, but not cropped. Reads all images, at 0.5 to
            1.5 ms each.
        hashes: With ``near``, a file of the dataset's hashes (25 bytes per record): read if it exists,
            otherwise written.
        workers: Number of processes that read; None is one per usable CPU.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The matches, in the order of the pictures, then of the records.

    Raises:
        UsageError: A picture does not decode, no picture is given, or ``hashes`` are given without ``near``.
        DataError: ``hashes`` is a file for another dataset.
        ManifestDamaged, UnknownVersion, OperationError, OSError: As :func:`.report` raises them.
    """
    check_flags(near=near)
    if hashes is not None and not near:
        raise UsageError("hashes are used only to find near images: give --near (in Python near=True)")
    if not images:
        raise UsageError("give at least one picture to look for")
    pictures = [_read_picture(image, near) for image in user_paths(images, "images")]
    with Dataset(dataset) as opened:
        with ImageReading.start(workers, progress) as reading:
            codes = _load_codes(opened, reading, hashes) if near else np.empty(0, CODES)
            digests = reading.map("read", _original_digest, opened, _candidates(opened, pictures))
        hashed, by_digest = codes[codes["is_hashed"]], defaultdict[bytes, list[int]](list)
        for record, digest in digests.items():
            by_digest[digest].append(record)
        classes, matches = opened.classes, []
        for picture in pictures:
            distances: dict[int, int | None] = {}
            if picture.hashes:
                apart = np.min(
                    [np.bitwise_count(hashed["hash"] ^ np.uint64(h)) for h in picture.hashes], axis=0
                )
                alike = apart <= DISTANCE
                distances = dict(zip(hashed["record"][alike].tolist(), apart[alike].tolist(), strict=True))
            distances |= {record: None for digest in picture.digests for record in by_digest.get(digest, ())}
            for record in sorted(distances):
                row = opened.index[record]
                label = int(row["label"])
                key, name = row["key"].decode("utf-8", "replace"), classes[label] if label >= 0 else None
                matches.append(ImageMatch(picture.path, record, key, label, name, distances[record]))
        return matches


def _read_picture(path: Path, near: bool) -> _Picture:
    if path.is_dir():
        raise UsageError("is a folder; give its images, such as FOLDER/*.jpg", path=path)
    with name_in_os_errors(path), os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        image = file.read() if size <= MAX_IMAGE_BYTES else b""
    if not image:
        raise UsageError(f"has {size:,} bytes; an image has 1 to {MAX_IMAGE_BYTES:,}", path=path)
    try:
        info = read_image_header(image)
        measures = measure(image, info.width, info.height) if near else None
    except BadImage as error:
        raise UsageError(f"is not a valid image: {error.message}", path=path) from error
    digests = frozenset({hashlib.sha256(image).digest(), _original_digest(None, image)})
    hashes = _hash_orientations(measures.small) if measures and not measures.is_flat else ()
    return _Picture(os.fspath(path), size, (info.width, info.height), digests, hashes)


def _hash_orientations(small: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    gray = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    turned = (np.rot90(each, turns) for each in (gray, gray[:, ::-1]) for turns in range(4))
    return tuple(perceptual_hash(np.ascontiguousarray(each)) for each in turned)


def _candidates(dataset: Dataset, pictures: Sequence[_Picture]) -> npt.NDArray[np.int64]:
    """Return the records that may come from these pictures, by their length or aspect ratio."""
    if not dataset.manifest.has_images:
        return np.empty(0, np.int64)
    index = dataset.index
    is_ready = (index["flags"] & ImageFlag.CROP_READY) != 0
    wide, high = index["width"].astype(np.int64), index["height"].astype(np.int64)
    fits = np.isin(index["length"], [picture.size for picture in pictures])
    # a crop-ready picture was made from another picture, which may be a record
    for (width, height), is_made in {(picture.sides, len(picture.digests) > 1) for picture in pictures}:
        alike = np.abs(wide * height - high * width) <= MAX_SIDE_SHIFT * max(width, height)
        smaller = (wide <= width) & (high <= height)
        fits |= alike & (is_made | (is_ready & smaller))
    return np.flatnonzero(fits)


def _load_codes(
    dataset: Dataset, reading: ImageReading, hashes: str | os.PathLike[str] | None
) -> npt.NDArray[Any]:
    """Return the rows of CODES of all images, from the file if it exists."""
    file = None if hashes is None else Path(user_path(hashes))
    head = f"{HASHES} {dataset.root}".encode()
    if file is not None and file.exists():
        with name_in_os_errors(file):
            found, _, rows = file.read_bytes().partition(b"\n")
        if found == head and not len(rows) % CODES.itemsize:
            codes = np.frombuffer(rows, CODES)
            if codes["record"].astype(np.uint64).max(initial=0) < len(dataset):
                return codes
        raise DataError("has no hashes of this dataset; remove it to make a new one", path=file)
    numbers = np.arange(len(dataset) if dataset.manifest.has_images else 0)
    codes = reading.statistics(dataset, numbers, numbers[:0]).codes
    if file is not None:
        save_bytes(file, head + b"\n" + codes.tobytes())
    return codes
