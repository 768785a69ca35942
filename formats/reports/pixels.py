"""Statistics of a dataset's pixels, from images decoded in other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import BadImage, CorruptRecord, ShardDamaged
from shardprep.formats.images.decode import REDUCED, crash_reason, cv2, decode
from shardprep.formats.images.header import JPEG_SIGNATURE
from shardprep.formats.runtime.jobs import completed_calls
from shardprep.formats.runtime.processes import ChildDied, ChildLost, WorkerPool, usable_cpus, use_one_thread
from shardprep.formats.runtime.progress import Progress, check_int, progress_or_bar
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.read import ADDRESS, FileEntry, Rows, Shard
from shardprep.formats.verification.checks import redirect_stderr

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


def measure(image: bytes, width: int, height: int) -> Measures:
    """Measure an encoded image, shrunk to a shorter side of SHORTER_SIDE pixels at most. Raises BadImage."""
    # the smallest scale that leaves SHORTER_SIDE pixels; of other kinds than JPEG, OpenCV would skip pixels,
    # which makes images sharper
    scales = REDUCED if image.startswith(JPEG_SIGNATURE) else (1,)
    scale = max((n for n in scales if min(width, height) >= n * SHORTER_SIDE), default=1)
    decoded = decode(image, cv2.IMREAD_COLOR | REDUCED[scale] | cv2.IMREAD_IGNORE_ORIENTATION)
    gray = _shrink(cv2.cvtColor(decoded, cv2.COLOR_BGR2GRAY), SHORTER_SIDE / min(decoded.shape[:2]))
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


def thumbnail(_row: np.void, image: bytes) -> bytes:
    """Return an upright JPEG file with a longer side of at most about THUMBNAIL_SIDE. Raises BadImage."""
    pixels = decode(image, cv2.IMREAD_COLOR)
    small = _shrink(pixels, THUMBNAIL_SIDE / max(pixels.shape))
    return cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, THUMBNAIL_QUALITY])[1].tobytes()


def perceptual_hash(small: npt.NDArray[Any]) -> int:
    """Return a hash of 64 bits that changes little if an image is scaled or compressed again.

    ``small`` is the image as 32x32 gray pixels. The bits say which of the 64 lowest frequencies of its cosine
    transform, except the mean, are in the upper half.
    """
    waves = cv2.dct(small.astype(np.float32))[LOWEST]
    return int.from_bytes(np.packbits(waves >= np.partition(waves, 32)[32]).tobytes(), "big")


# The lowest frequencies except the mean, from coarse to fine.
_PLACES = sorted(product(range(MEAN_SIDE), repeat=2), key=lambda place: (sum(place), place))[1:65]
LOWEST = tuple(np.array(_PLACES).T)


def _shrink(pixels: npt.NDArray[Any], scale: float) -> npt.NDArray[Any]:
    """Return the pixels at a scale, unchanged if it is near to 1 or above."""
    if scale > NEAR:
        return pixels
    height, width = pixels.shape[:2]
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 0.5 else cv2.INTER_LINEAR)


MAX_EXTREMES = 12

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

MEASURED = np.dtype([("record", "<i8"), *((name, "<f8") for name in MEASURES)])
"""A row per decoded image."""

Numbers = npt.NDArray[np.int64]
Damaged = list[tuple[int, str]]
"""The numbers of records that cannot be read or decoded, with reasons."""
Look = Callable[[np.void, bytes], Any]
"""Looks at a record's row of the index and its image, in another process. Raises BadImage."""


def digest_of(_row: np.void, image: bytes) -> tuple[int, None]:
    """Return the first 8 bytes of the BLAKE3 digest of an image's bytes."""
    return int.from_bytes(blake3(image).digest(8), "little"), None


def digest_and_measures(row: np.void, image: bytes) -> tuple[int, Measures]:
    return digest_of(row, image)[0], measure(image, int(row["width"]), int(row["height"]))


@dataclass(frozen=True, eq=False)
class PixelStatistics:
    """The statistics of one dataset's images.

    ``codes`` are rows of CODES, ``measures`` rows of MEASURED, ``small_sum`` uint64 [32, 32, 3] is the sum of
    the decoded images' small versions, and ``damaged`` is in the order of the records.
    """

    codes: Rows
    measures: Rows
    small_sum: npt.NDArray[np.uint64]
    damaged: Damaged

    def extremes(self, name: str) -> list[tuple[float, int]]:
        """Return the first images of a list in EXTREMES, as (value, record)."""
        measure, sign = EXTREMES[name]
        rows = self.measures
        if name == "blurriest":
            rows = rows[rows["contrast"] >= FLAT]  # a flat image has nothing to be sharp
        values = rows[measure].round(3)
        first = np.lexsort((rows["record"], sign * values))[:MAX_EXTREMES]
        return list(zip(values[first].tolist(), rows["record"][first].tolist(), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object: the histograms, and the mean image, [32][32][3] in RGB or None."""
        images = len(self.measures)
        mean = (self.small_sum / images).round().astype(np.uint8).tolist() if images else None
        histograms = {}
        for name, edges in MEASURES.items():
            counts = np.histogram(np.minimum(self.measures[name], edges[-1]), edges)[0]
            histograms[name] = {"edges": [round(e, 3) for e in edges.tolist()], "counts": counts.tolist()}
        return {"histograms": histograms, "mean_image": mean}


@dataclass(frozen=True, eq=False)
class ShardLook:
    """A look at records of the shard at ``path``: ``rows`` of the index, and their ``numbers``. Picklable."""

    look: Look
    path: Path
    container: str
    entry: FileEntry
    rows: Rows
    numbers: Numbers

    def run(self) -> tuple[list[tuple[int, Any]], Damaged]:
        """Read the records; return their numbers with results, and damaged records. Raises OSError."""
        use_one_thread()
        results: list[tuple[int, Any]] = []
        damaged: Damaged = []
        try:
            with (
                Path(os.devnull).open("wb") as nowhere,
                redirect_stderr(nowhere),
                closing(Shard(self.path, self.container, self.entry)) as shard,
            ):
                for row, number in zip(self.rows, self.numbers.tolist(), strict=True):
                    address = row[[*ADDRESS]].item()
                    try:
                        image = shard.read_image(int(row["ordinal"]), address)
                        results.append((number, self.look(row, image)))
                    except (BadImage, CorruptRecord, ShardDamaged) as error:
                        damaged.append((number, error.message))
        except ShardDamaged as error:  # it cannot be opened
            return [], self.all_damaged(error.message)
        except FileNotFoundError:
            return [], self.all_damaged("the shard is missing")
        return results, damaged

    def all_damaged(self, reason: str) -> Damaged:
        return [(number, reason) for number in self.numbers.tolist()]


MAX_AT_ONCE = 512  # images per call, to keep the progress moving


@dataclass(frozen=True)
class ImageReading:
    """Reads images in a pool of processes."""

    pool: WorkerPool
    workers: int
    progress: Progress

    @classmethod
    @contextmanager
    def start(cls, workers: int | None, progress: Progress | None) -> Iterator[Self]:
        """Start ``workers`` processes, None is one per usable CPU, and end them with the context."""
        count = max(1, check_int(usable_cpus() if workers is None else workers, "workers", least=0))
        with WorkerPool(count) as pool:
            yield cls(pool, count, progress_or_bar(progress))

    def statistics(self, dataset: Dataset, decoded: Numbers, compared: Numbers) -> PixelStatistics:
        """Return the statistics of ``decoded`` images, with the digests of ``compared`` ones, too."""
        codes, measures = [np.empty(0, CODES)], [np.empty(0, MEASURED)]
        small_sum, damaged = np.zeros((MEAN_SIDE, MEAN_SIDE, 3), np.uint64), []
        looks: list[tuple[str, Look, Numbers]] = [
            ("examine", digest_and_measures, decoded),
            ("compare", digest_of, compared),
        ]
        for verb, look, records in looks:
            for results, wrong in self._run_looks(verb, look, dataset, records):
                damaged += wrong
                rows = [
                    (record, digest, one.hash if one else 0, one is not None and not one.is_flat)
                    for record, (digest, one) in results
                ]
                codes.append(np.array(rows, CODES))
                seen = [(record, one) for record, (_, one) in results if one]
                measures.append(np.array([(record, *one[: len(MEASURES)]) for record, one in seen], MEASURED))
                small_sum = sum((one.small for _, one in seen), small_sum)
        every = np.concatenate(codes)
        in_order = every[np.argsort(every["record"])]
        return PixelStatistics(in_order, np.concatenate(measures), small_sum, sorted(damaged))

    def map(self, verb: str, look: Look, dataset: Dataset, records: Numbers) -> dict[int, Any]:
        """Return the results for the images that can be read and decoded. Raises OSError."""
        return {
            record: value
            for results, _ in self._run_looks(verb, look, dataset, records)
            for record, value in results
        }

    def _run_looks(
        self, verb: str, look: Look, dataset: Dataset, records: Numbers
    ) -> Iterator[tuple[list[tuple[int, Any]], Damaged]]:
        """Yield the results and the damaged records, part by part.

        Few looks are submitted at a time, since each holds its rows of the index. Raises a look's errors, and
        ChildLost.
        """
        if not len(records):
            return
        manifest, index = dataset.manifest, dataset.index
        ends = np.searchsorted(index["shard"][records], np.arange(len(manifest.shards) + 1)).tolist()
        looks = (
            ShardLook(look, dataset.path / shard.name, manifest.container, shard, index[part], part)
            for shard, start, end in zip(manifest.shards, ends, ends[1:], strict=False)
            for part in (records[at : min(at + MAX_AT_ONCE, end)] for at in range(start, end, MAX_AT_ONCE))
        )
        halves: list[ShardLook] = []
        done_records = done_bytes = 0
        size = int(index["length"][records].sum(dtype=np.int64))
        with (
            self.progress.task(f"{verb} {manifest.split}", records=len(records), size=size),
            closing(
                completed_calls(
                    lambda: halves.pop() if halves else next(looks, None),
                    lambda job: self.pool.submit(job.run),
                    self.workers + 1,
                )
            ) as finished,
        ):
            for job, future in filter(None, finished):
                try:
                    yield future.result()
                except ChildDied as error:  # halved until the image is found
                    if (count := len(job.numbers)) > 1:
                        parts = slice(count // 2), slice(count // 2, None)
                        halves += [replace(job, rows=job.rows[p], numbers=job.numbers[p]) for p in parts]
                        continue
                    yield [], job.all_damaged(crash_reason(error.signal))
                except ChildLost as error:
                    error.path, error.shard = str(dataset.path), job.path.name
                    raise
                done_records += len(job.numbers)
                done_bytes += int(job.rows["length"].sum())
                self.progress.at(done_records, done_bytes)
