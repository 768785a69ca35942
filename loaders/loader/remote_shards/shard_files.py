"""The files of a dataset's shards that a loader reads, and how many bytes of them are used at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.published_file import FileEntry
from shardprep.loaders.order.shard_uses import ShardUses


class ShardFiles:
    """The files that are read of each shard: of the images, and of each column that has its own.

    ``kinds`` are the files of each of these, by shard.
    """

    def __init__(self, kinds: Sequence[Sequence[FileEntry]]) -> None:
        self._kinds = kinds
        self.per_shard = len(kinds)
        self.sizes: npt.NDArray[np.int64] = sum(
            (np.array([file.size for file in files], np.int64) for files in kinds),
            start=np.zeros(1, np.int64),
        )

    @property
    def total(self) -> int:
        """The bytes of all of them."""
        return int(self.sizes.sum())

    def of(self, shards: Iterable[int]) -> list[FileEntry]:
        """Return the files of these shards, one shard after the other."""
        return [files[shard] for shard in shards for files in self._kinds]

    def least(self, uses: Sequence[ShardUses]) -> int:
        """Return the bytes that epochs like these need at once, with one shard more that is on its way."""
        if not self._kinds:
            return 0
        peak = max(each.peak(self.sizes) for each in uses)
        return min(self.total, peak + int(self.sizes.max(initial=0)))
