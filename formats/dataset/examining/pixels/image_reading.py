"""The reading of images of opened datasets, in worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.processes.worker_pool import WorkerPool
from shardprep.formats.progress import Progress

from .look_runner import run_looks
from .pixel_statistics import PixelStatistics
from .shard_looks import Merged, PixelLook, ShardLook, ThumbnailLook, Thumbnails, looks_at

Numbers = npt.NDArray[np.int64]
T = TypeVar("T", bound=Merged)


@dataclass(frozen=True)
class ImageReading:
    """The processes that read, how many they are, and what is told of the progress."""

    pool: WorkerPool
    workers: int
    progress: Progress

    def statistics(
        self, dataset: Dataset, records: Numbers, is_decoded: npt.NDArray[np.bool_]
    ) -> PixelStatistics:
        """Return the statistics of these records, in order, decoded or only read. Raises OSError."""
        looks = PixelLook, records, is_decoded
        return self._run(f"examine {dataset.manifest.split}", dataset, looks, PixelStatistics())

    def pictures(self, dataset: Dataset, records: Numbers) -> Thumbnails:
        """Return thumbnails of these records, in order, of those that decode. Raises OSError."""
        looks = ThumbnailLook, records, np.ones(len(records), bool)
        return self._run(f"pictures of {dataset.manifest.split}", dataset, looks, Thumbnails())

    def _run(
        self,
        title: str,
        dataset: Dataset,
        looks: tuple[type[ShardLook[T]], Numbers, npt.NDArray[np.bool_]],
        into: T,
    ) -> T:
        kind, records, is_decoded = looks
        size = int(dataset.index["length"][records].sum(dtype=np.int64))
        made = looks_at(dataset, records, is_decoded, kind)
        with self.progress.task(title, records=len(records), size=size):
            return run_looks(made, into, self.pool, self.workers, self.progress)
