"""Statistics of a dataset's pixels, from images decoded in other processes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import BadImage, CorruptRecord, ShardDamaged
from shardprep.formats.images.decode import REDUCED_COLOR, crashes_decoder, decode
from shardprep.formats.images.kinds import JPEG_SIGNATURE
from shardprep.formats.images.opencv import cv2
from shardprep.formats.runtime.processes import use_one_thread
from shardprep.formats.runtime.progress import Progress
from shardprep.formats.runtime.workers import ChildDied, WorkerPool
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.read import FileEntry, Rows, Shard
from shardprep.formats.verification.checks import stderr_in

MEAN_SIDE = 32  # pixels of the mean image
FLAT = 2.0  # gray levels; below this contrast a hash is noise


class Measures(NamedTuple):
    """The measures of one image, decoded without applying EXIF orientation.

    ``brightness`` is the mean gray level, ``contrast`` the standard deviation (both 0 to 255), and
    ``sharpness`` the variance of the Laplacian, all with a shorter side of at most 128 pixels. ``hash`` is a
    perceptual hash of 64 bits, and ``small`` the image as uint8 [32, 32, 3] in RGB.
    """

    brightness: float
    contrast: float
    sharpness: float
    hash: int
    small: npt.NDArray[np.uint8]

    @property
    def is_flat(self) -> bool:
        """Whether there is too little contrast for a meaningful hash."""
        return self.contrast < FLAT


SHORTER_SIDE = 128  # pixels of a measured image, as contrast and sharpness depend on the scale
NEAR = 0.9  # scales above this blur more than they shrink
THUMBNAIL_SIDE = 104
THUMBNAIL_QUALITY = 72


def measured(image: bytes, width: int, height: int) -> Measures:
    """Measure an encoded image of this size, shrunk to a shorter side of SHORTER_SIDE pixels if larger.

    Raises BadImage if it does not decode.
    """
    decoded = decode(image, _scale(image, min(width, height)) | cv2.IMREAD_IGNORE_ORIENTATION)
    gray = _smaller(cv2.cvtColor(decoded, cv2.COLOR_BGR2GRAY), SHORTER_SIDE / min(decoded.shape[:2]))
    mean, deviation = cv2.meanStdDev(gray)
    laplacian = cv2.meanStdDev(cv2.Laplacian(gray, cv2.CV_16S))[1]
    small: npt.NDArray[Any] = cv2.resize(decoded, (MEAN_SIDE, MEAN_SIDE), interpolation=cv2.INTER_AREA)
    return Measures(
        brightness=float(mean[0, 0]),
        contrast=float(deviation[0, 0]),
        sharpness=float(laplacian[0, 0]) ** 2,
        hash=perceptual_hash(cv2.cvtColor(small, cv2.COLOR_BGR2GRAY)),
        small=np.ascontiguousarray(small[:, :, ::-1]).astype(np.uint8),
    )


def _scale(image: bytes, side: int) -> int:
    """Return OpenCV's flag for the smallest JPEG scale that leaves SHORTER_SIDE pixels.

    Other kinds are decoded at full size: OpenCV would skip pixels, which makes images sharper.
    """
    enough = (
        [n for n in REDUCED_COLOR if side >= n * SHORTER_SIDE] if image.startswith(JPEG_SIGNATURE) else []
    )
    return REDUCED_COLOR[max(enough, default=1)]


def thumbnail(image: bytes) -> bytes:
    """Return an upright JPEG file with a longer side of at most about THUMBNAIL_SIDE. Raises BadImage."""
    pixels = decode(image, cv2.IMREAD_COLOR)
    small = _smaller(pixels, THUMBNAIL_SIDE / max(pixels.shape))
    return cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, THUMBNAIL_QUALITY])[1].tobytes()


def perceptual_hash(small: npt.NDArray[Any]) -> int:
    """Return a hash of 64 bits that changes little if an image is scaled or compressed again.

    ``small`` is the image as 32x32 gray pixels. The bits say which of the 64 lowest frequencies of its cosine
    transform, except the mean, are in the upper half.
    """
    waves = cv2.dct(small.astype(np.float32))[LOWEST]
    bits = waves >= np.partition(waves, 32)[32]
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


# The lowest frequencies except the mean, from coarse to fine.
_PLACES = sorted(product(range(MEAN_SIDE), repeat=2), key=lambda place: (sum(place), place))[1:65]
LOWEST = tuple(np.array(_PLACES).T)


def _smaller(pixels: npt.NDArray[Any], scale: float) -> npt.NDArray[Any]:
    """Return the pixels at a scale, unchanged if it is near to 1 or above."""
    if scale > NEAR:
        return pixels
    height, width = pixels.shape[:2]
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 0.5 else cv2.INTER_LINEAR)


MOST_EXTREMES = 12
MOST_DAMAGED = 24  # images named; all are counted

MEASURES: dict[str, npt.NDArray[np.float64]] = {
    "brightness": np.linspace(0, 256, 33),
    "contrast": np.linspace(0, 128, 33),
    "sharpness": np.concatenate([[0.0], np.geomspace(1, 1 << 16, 33)]),
}
"""The edges of each histogram; the last bar includes larger values."""

EXTREMES: dict[str, tuple[str, int]] = {
    "brightest": ("brightness", -1),
    "darkest": ("brightness", 1),
    "flattest": ("contrast", 1),
    "blurriest": ("sharpness", 1),
}
"""The measure that sorts each list of extremes, ascending (1) or descending (-1)."""

CODES = np.dtype([("record", "<i8"), ("digest", "<u8"), ("hash", "<u8"), ("is_hashed", "?")])
"""A row per image read: its digest and, if it was decoded and is not flat, its perceptual hash."""

Numbers = npt.NDArray[np.int64]
Looked = tuple[int, Measures | None]
"""The first 8 bytes of the BLAKE3 digest of an image's bytes, and its measures if it was decoded."""


def look(row: np.void, image: bytes, is_decoded: bool) -> Looked:
    """Digest and measure an image. Raises BadImage."""
    digest = int.from_bytes(blake3(image).digest(8), "little")
    return digest, measured(image, int(row["width"]), int(row["height"])) if is_decoded else None


class PixelStatistics:
    """The statistics of one dataset's images, added in the order of their record numbers.

    ``images`` is the number of decoded images, and ``small_sum`` uint64 [32, 32, 3] the sum of their small
    versions. ``counts`` are int64 histograms, ``extremes`` the first images of each list as (value, record),
    ``damaged`` the first images that cannot be read or decoded, with reasons, and ``damaged_records`` the
    numbers of all such images. ``codes`` are arrays of CODES.
    """

    def __init__(self, looked: Sequence[tuple[int, Looked]] = ()) -> None:
        decoded = [(record, measures) for record, (_, measures) in looked if measures]
        self.images = len(decoded)
        blank = np.zeros((MEAN_SIDE, MEAN_SIDE, 3), np.uint64)
        self.small_sum = sum((measures.small for _, measures in decoded), blank)
        self.counts = {}
        for name, edges in MEASURES.items():
            values = [getattr(measures, name) for _, measures in decoded]
            self.counts[name] = np.histogram(np.minimum(values, edges[-1]), edges)[0]
        self.extremes: dict[str, list[tuple[float, int]]] = {name: [] for name in EXTREMES}
        textured = [one for one in decoded if not one[1].is_flat]  # a flat image has nothing to be sharp
        for name, (measure, _) in EXTREMES.items():
            some = textured if name == "blurriest" else decoded
            self._keep(name, [(round(getattr(each, measure), 3), record) for record, each in some])
        self.damaged: list[tuple[int, str]] = []
        self.damaged_records: list[int] = []
        rows = [
            (record, code, measures.hash if measures else 0, measures is not None and not measures.is_flat)
            for record, (code, measures) in looked
        ]
        self.codes = [np.array(rows, CODES)]

    def merge(self, other: PixelStatistics, damaged: Sequence[tuple[int, str]]) -> None:
        """Add the next part of the dataset, with its damaged images."""
        self.images += other.images
        self.small_sum += other.small_sum
        for name, counts in other.counts.items():
            self.counts[name] += counts
        for name, found in other.extremes.items():
            self._keep(name, found)
        self.damaged_records += [record for record, _ in damaged]
        self.damaged = [*self.damaged, *damaged][:MOST_DAMAGED]
        self.codes += other.codes

    def _keep(self, name: str, found: Iterable[tuple[float, int]]) -> None:
        sign = EXTREMES[name][1]
        both = sorted([*self.extremes[name], *found], key=lambda one: (sign * one[0], one[1]))
        self.extremes[name] = both[:MOST_EXTREMES]

    @property
    def all_codes(self) -> npt.NDArray[np.void]:
        """The rows of all images read, in order."""
        return np.concatenate(self.codes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object: the histograms, and the mean image, [32][32][3] in RGB or None."""
        mean = (self.small_sum / self.images).round().astype(np.uint8).tolist() if self.images else None
        return {
            "histograms": {
                name: {"edges": [round(e, 3) for e in edges.tolist()], "counts": self.counts[name].tolist()}
                for name, edges in MEASURES.items()
            },
            "mean_image": mean,
        }


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ShardLook(Generic[T]):
    """A look at records of the shard at ``path``: ``rows`` of the index, and their ``numbers``. Picklable.

    ``look`` is called with a record's row, its image and its ``is_decoded``, which is whether to examine its
    pixels. ``gather`` is called with the list of record numbers and results.
    """

    look: Callable[[np.void, bytes, bool], Any]
    gather: Callable[[list[tuple[int, Any]]], T]
    path: Path
    container: str
    entry: FileEntry
    rows: Rows
    numbers: Numbers
    is_decoded: npt.NDArray[np.bool_]

    def made(self) -> tuple[T, list[tuple[int, str]]]:
        """Read the records; return the gathered result, and damaged records with reasons. Raises OSError."""
        use_one_thread()
        found: list[tuple[int, Any]] = []
        damaged: list[tuple[int, str]] = []
        try:
            with (
                Path(os.devnull).open("wb") as nowhere,
                stderr_in(nowhere),
                closing(Shard(self.path, self.container, self.entry)) as shard,
            ):
                for row, number, is_decoded in zip(self.rows, self.numbers, self.is_decoded, strict=True):
                    address = row[["key", "label", "crc32c", "offset", "length"]].item()
                    try:
                        image = shard.image(int(row["ordinal"]), address)
                        found.append((int(number), self.look(row, image, bool(is_decoded))))
                    except (BadImage, CorruptRecord, ShardDamaged) as error:
                        damaged.append((int(number), error.message))
        except ShardDamaged as error:  # it cannot be opened
            return self.all_damaged(error.message)
        except FileNotFoundError:
            return self.all_damaged("the shard is missing")
        return self.gather(found), damaged

    def all_damaged(self, reason: str) -> tuple[T, list[tuple[int, str]]]:
        """Return the result where no record can be examined."""
        return self.gather([]), [(number, reason) for number in self.numbers.tolist()]


MOST_AT_ONCE = 512  # images per call, to keep the progress moving


@dataclass(frozen=True)
class ImageReading:
    """Reads images in a pool of processes."""

    pool: WorkerPool
    workers: int
    progress: Progress

    def statistics(
        self, dataset: Dataset, records: Numbers, is_decoded: npt.NDArray[np.bool_]
    ) -> PixelStatistics:
        """Return the statistics of these records. Raises OSError."""
        found = PixelStatistics()
        for part, damaged in self._looked("examine", look, PixelStatistics, dataset, records, is_decoded):
            found.merge(part, damaged)
        return found

    def each(
        self, verb: str, made: Callable[[bytes], bytes], dataset: Dataset, records: Numbers
    ) -> dict[int, bytes]:
        """Return a function's results for the images that can be read and decoded. Raises OSError."""
        is_decoded = np.ones(len(records), bool)
        parts = self._looked(verb, partial(_made, made), dict, dataset, records, is_decoded)
        return {record: value for part, _ in parts for record, value in part.items()}

    def _looked(
        self,
        verb: str,
        look: Callable[[np.void, bytes, bool], Any],
        gather: Callable[[list[tuple[int, Any]]], T],
        dataset: Dataset,
        records: Numbers,
        is_decoded: npt.NDArray[np.bool_],
    ) -> Iterator[tuple[T, list[tuple[int, str]]]]:
        """Yield the gathered results and the damaged records, part by part in order.

        Few looks are submitted at a time, since each holds its rows of the index. Raises a look's errors, and
        ChildLost.
        """
        manifest = dataset.manifest
        ends = np.searchsorted(dataset.index["shard"][records], np.arange(len(manifest.shards) + 1)).tolist()

        def looks() -> Iterator[ShardLook[T]]:
            for shard, start, end in zip(manifest.shards, ends, ends[1:], strict=False):
                for at in range(start, end, MOST_AT_ONCE):
                    part = slice(at, min(at + MOST_AT_ONCE, end))
                    rows, path = dataset.index[records[part]], dataset.path / shard.name
                    yield ShardLook(
                        look, gather, path, manifest.container, shard, rows, records[part], is_decoded[part]
                    )

        submitted = ((look, self.pool.submit(look.made)) for look in looks())
        done_records = done_bytes = 0
        size = int(dataset.index["length"][records].sum(dtype=np.int64))
        with self.progress.task(f"{verb} {manifest.split}", records=len(records), size=size):
            waiting = deque(islice(submitted, self.workers))
            while waiting:
                waiting.extend(islice(submitted, 1))
                one, future = waiting.popleft()
                yield from self._values(one, future)
                done_records += len(one.numbers)
                done_bytes += int(one.rows["length"].sum())
                self.progress.at(done_records, done_bytes)

    def _values(
        self, look: ShardLook[T], future: Future[tuple[T, list[tuple[int, str]]]]
    ) -> Iterator[tuple[T, list[tuple[int, str]]]]:
        """Yield the result; a look that crashes its process is halved until the image is found."""
        try:
            yield future.result()
        except ChildDied as error:
            if len(look.numbers) == 1:
                yield look.all_damaged(crashes_decoder(error.signal))
                return
            half = -(-len(look.numbers) // 2)
            for part in (slice(half), slice(half, None)):
                rows, numbers, is_decoded = look.rows[part], look.numbers[part], look.is_decoded[part]
                smaller = replace(look, rows=rows, numbers=numbers, is_decoded=is_decoded)
                yield from self._values(smaller, self.pool.submit(smaller.made))


def _made(made: Callable[[bytes], bytes], row: np.void, image: bytes, is_decoded: bool) -> bytes:
    return made(image)
