"""Each rank's part of an epoch, as ranges of places in its order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError

from .partitions import places_in

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankSplit:
    """The batches of one rank, as ranges of places in the epoch's order.

    A global step takes ``world_size * batch_size`` places, of which rank r has the r-th ``batch_size``. With
    ``drop_last`` the epoch ends with the last full step, the same number for every rank. Otherwise the places
    that remain are split as evenly as possible, the lower ranks having one more, and a rank that gets none
    has one batch less. ``start`` continues an epoch at the end of a global step of any world size.
    """

    records: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank must be between 0 and {self.world_size - 1}, not {self.rank}")
        if not 0 <= self.start <= self.records:
            raise UsageError(f"an epoch of {self.records} records cannot continue at {self.start}")

    @property
    def stop(self) -> int:
        """The place where the epoch ends for all ranks: ``records``, or less with ``drop_last``."""
        return self._remainder_start if self.drop_last else self.records

    def __len__(self) -> int:
        return self._full_steps + (not self.drop_last and len(self._remainder) > 0)

    def batch(self, step: int) -> range:
        """The places of this rank's batch of this step, counted from ``start``. Raises IndexError."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        if step == self._full_steps:
            return self._remainder
        first = self.start + step * self._step_records + self.rank * self.batch_size
        return range(first, first + self.batch_size)

    def end(self, step: int) -> int:
        """The place that all ranks have reached after this step; a state keeps it as ``start``."""
        return min(self.start + (step + 1) * self._step_records, self.stop)

    def steps_of(self, places: Places) -> Places:
        """Return the step of each place, -1 for those of other ranks and of no step."""
        steps, within = np.divmod(places - self.start, self._step_records)
        first = self.rank * self.batch_size
        is_own = (within >= first) & (within < first + self.batch_size)
        steps[~is_own | (steps < 0) | (steps >= self._full_steps)] = -1
        if not self.drop_last:
            rest = self._remainder
            steps[(places >= rest.start) & (places < rest.stop)] = self._full_steps
        return steps

    def steps_reached(self, places: Places) -> Places:
        """Return the step in which all ranks together reach each place; the nearest for those outside."""
        return np.clip((places - self.start) // self._step_records, 0, max(0, len(self) - 1))

    @property
    def _step_records(self) -> int:
        return self.world_size * self.batch_size

    @property
    def _full_steps(self) -> int:
        return (self.records - self.start) // self._step_records

    @property
    def _remainder_start(self) -> int:
        return self.start + self._full_steps * self._step_records

    @property
    def _remainder(self) -> range:
        share, extra = divmod(self.records - self._remainder_start, self.world_size)
        first = self._remainder_start + self.rank * share + min(self.rank, extra)
        return range(first, first + share + (self.rank < extra))


class EpochSplit:
    """The batches of one rank, as places in the partitions of an epoch's order.

    Every partition gives the same share of each global step. A rank has the shares of adjacent partitions,
    one after the other, or one of several equal parts of a partition's share. So the batches of a step, rank
    after rank, are the same records for any number of ranks. With one partition it is ``whole``, a split of
    the epoch's places. Raises UsageError for a world size or a batch size that gives unequal shares.
    """

    def __init__(self, whole: RankSplit, partitions: int) -> None:
        self.whole = whole
        self._partitions = partitions
        self._sharing = max(1, whole.world_size // partitions)  # ranks of one partition
        self._owned = max(1, partitions // whole.world_size)
        self._check()

    def _check(self) -> None:
        world_size, batch_size = self.whole.world_size, self.whole.batch_size
        if self._owned * world_size != self._sharing * self._partitions:
            sizes = [str(n) for n in range(1, self._partitions) if self._partitions % n == 0]
            raise UsageError(
                f"{self._partitions} partitions are not equally many for each of {world_size} ranks; use a world_size "
                f"of {', '.join(sizes)} or a multiple of {self._partitions}, or other partitions"
            )
        if batch_size % self._owned:
            below = batch_size // self._owned * self._owned
            sizes = [str(size) for size in (below, below + self._owned) if size]
            raise UsageError(
                f"a batch_size of {batch_size} has no equal shares of the {self._owned} partitions of each of "
                f"{world_size} ranks; use {' or '.join(sizes)}"
            )
        if 0 < self.whole.records < self._partitions:
            raise UsageError(
                f"{self.whole.records} records are too few for {self._partitions} partitions; use at most as many"
            )

    @property
    def partitions(self) -> range:
        """The partitions of this rank."""
        first = self.whole.rank * self._partitions // self.whole.world_size
        return range(first, first + self._owned)

    @cached_property
    def parts(self) -> dict[int, RankSplit]:
        """This rank's part of each of its partitions, by partition."""
        return {number: self._part(number) for number in self.partitions}

    def _part(self, number: int) -> RankSplit:
        """This rank's part of a partition."""
        return replace(
            self.whole,
            records=places_in(self.whole.records, number, self._partitions),
            batch_size=self.whole.batch_size // self._owned,
            rank=self.whole.rank % self._sharing,
            world_size=self._sharing,
            start=places_in(self.whole.start, number, self._partitions),
        )

    def __len__(self) -> int:
        return len(self.whole) if self.whole.drop_last else max(map(len, self.parts.values()))

    def places(self, step: int) -> dict[int, range]:
        """Return the places of this rank's batch of this step, by partition. Raises IndexError."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        return {number: part.batch(step) for number, part in self.parts.items() if step < len(part)}
