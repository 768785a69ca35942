"""Looks at images of one shard, in a process that a damaged image may crash."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.registry import container
from shardprep.formats.containers.table import Rows
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.errors import BadImage, CorruptRecord, ShardDamaged
from shardprep.formats.images.decode_check import crashes_decoder
from shardprep.formats.processes.one_thread import use_one_thread

from .measures import digest
from .pixel_statistics import CODES, PixelStatistics


class Merged(Protocol):
    """A result that the result of another part of a shard is merged into."""

    def merge(self, other: Self, /) -> None: ...


T = TypeVar("T", bound=Merged)


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what C libraries write to descriptor 2, in a process that does nothing else."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


@dataclass(frozen=True, eq=False)
class ShardLook(ABC, Generic[T]):
    """A look at records of the shard at ``path``: ``rows`` of the index, with their record ``numbers``.
    Picklable.

    ``is_decoded`` says for each whether its pixels are looked at.
    """

    path: Path
    container: str
    rows: Rows
    numbers: npt.NDArray[np.int64]
    is_decoded: npt.NDArray[np.bool_]

    def made(self) -> T:
        """Read the records, and return what is found. Raises OSError."""
        use_one_thread()
        found = self.empty()
        try:
            with _silent(), container(self.container).read(self.path) as reader:
                for row, number, is_decoded in zip(self.rows, self.numbers, self.is_decoded, strict=True):
                    indexed = (row["key"].item(), row["label"].item(), row["crc32c"].item())
                    try:
                        image = reader.checked(int(row["ordinal"]), indexed=indexed).image
                        self.look(found, int(number), row, image, is_decoded=bool(is_decoded))
                    except (BadImage, CorruptRecord, ShardDamaged) as error:
                        self.damaged(found, int(number), error.message)
        except ShardDamaged as error:  # it cannot be opened
            return self._without_shard(error.message)
        except FileNotFoundError:
            return self._without_shard("the shard is missing")
        return found

    def _without_shard(self, reason: str) -> T:
        found = self.empty()
        for number in self.numbers.tolist():
            self.damaged(found, number, reason)
        return found

    def part(self, places: slice) -> Self:
        """Return the look at some of the records."""
        return replace(
            self,
            rows=self.rows[places],
            numbers=self.numbers[places],
            is_decoded=self.is_decoded[places],
        )

    def crashed(self, signal: str) -> T:
        """Return what is found of a single image that crashed the process."""
        found = self.empty()
        self.damaged(found, int(self.numbers[0]), crashes_decoder(signal))
        return found

    @abstractmethod
    def empty(self) -> T:
        """Return a result without images."""

    @abstractmethod
    def look(self, found: T, number: int, row: np.void, image: bytes, *, is_decoded: bool) -> None:
        """Look at an image. Raises BadImage."""

    @abstractmethod
    def damaged(self, found: T, number: int, reason: str) -> None:
        """Note an image that cannot be looked at."""


class PixelLook(ShardLook[PixelStatistics]):
    """The statistics of the images, and their digests."""

    def empty(self) -> PixelStatistics:
        return PixelStatistics()

    def look(
        self, found: PixelStatistics, number: int, row: np.void, image: bytes, *, is_decoded: bool
    ) -> None:
        from .image_measures import measured  # start-up time: OpenCV

        measures = measured(image, int(row["width"]), int(row["height"])) if is_decoded else None
        is_hashed = measures is not None and not measures.is_flat
        code = (number, digest(image), measures.hash if measures else 0, is_hashed)
        found.codes.append(np.array([code], CODES))
        if measures:
            found.add(number, measures)

    def damaged(self, found: PixelStatistics, number: int, reason: str) -> None:
        found.add_damaged(number, reason)

    def made(self) -> PixelStatistics:
        found = super().made()
        found.codes = [np.concatenate([np.empty(0, CODES), *found.codes])]
        return found


class Thumbnails(dict[int, bytes]):
    """JPEG files of about a hundred pixels a side, by record number."""

    def merge(self, other: Thumbnails) -> None:
        """Add those of another part."""
        self.update(other)


class ThumbnailLook(ShardLook[Thumbnails]):
    """Small versions of the images, upright; none of those that do not decode."""

    def empty(self) -> Thumbnails:
        return Thumbnails()

    def look(self, found: Thumbnails, number: int, row: np.void, image: bytes, *, is_decoded: bool) -> None:
        from .image_measures import thumbnail  # start-up time: OpenCV

        found[number] = thumbnail(image)

    def damaged(self, found: Thumbnails, number: int, reason: str) -> None:
        """Do nothing: the image has no thumbnail."""


def looks_at(
    dataset: Dataset,
    records: npt.NDArray[np.int64],
    is_decoded: npt.NDArray[np.bool_],
    kind: type[ShardLook[T]],
) -> Iterator[ShardLook[T]]:
    """Yield one look for each shard that has some of the records, given in order."""
    manifest = dataset.manifest
    of_shard = dataset.index["shard"][records]
    ends = np.searchsorted(of_shard, np.arange(len(manifest.shards) + 1))
    for number, shard in enumerate(manifest.shards):
        places = slice(int(ends[number]), int(ends[number + 1]))
        if places.start < places.stop:
            yield kind(
                dataset.path / shard.name,
                manifest.container,
                dataset.index[records[places]],
                records[places],
                is_decoded[places],
            )
