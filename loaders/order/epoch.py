"""One epoch of a dataset: its batches, receipt and state, and resuming from a state. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.lazy import cached_property
from shardprep.loaders.order.epoch_order import (
    EpochOrder,
    EpochSplit,
    RankSplit,
    Shuffle,
    epoch_order,
    shard_order,
)
from shardprep.loaders.order.omission import Omission, Ranges
from shardprep.loaders.order.parts import Records
from shardprep.loaders.order.receipt import Receipt, Tally
from shardprep.loaders.order.rng import Purpose, keyed_bits

STATE_VERSION, SKIPPING_STATE_VERSION = 1, 2  # a release without skipped steps must refuse the latter
NOTHING: Records = np.empty(0, np.int64)


@dataclass(frozen=True)
class EpochPlan:
    """The parameters of one rank's batches in every epoch; equal plans give equal batches.

    ``dataset`` is the root of its manifest. ``omission`` has the records that no epoch delivers. ``passed``
    has ascending ranges of places that one epoch skips: whole steps of all ranks. Raises UsageError if there
    are records, but some rank would get no batch.
    """

    dataset: str
    shard_counts: tuple[int, ...]
    shuffle: Shuffle | None
    seed: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    omission: Omission | None = None
    passed: Ranges = ()

    def __post_init__(self) -> None:
        if self._closes and self.partitions > 1:
            raise UsageError(
                'gaps="close" would give the partitions of a shuffle unequal shares; use gaps="keep", or a shuffle '
                "without partitions"
            )
        if self._closes and self.omission and self.omission.weights:
            raise UsageError(
                'gaps="close" is not possible with weights, which repeat a record a different number of times in '
                'each epoch; use gaps="keep"'
            )
        records = self.split(0).whole.records  # also checks the batch size, the ranks and the partitions
        if not self.passed and 0 < records < self.partitions:
            raise UsageError(f"{records} records are too few for {self.partitions} partitions; use fewer")
        if not self.passed and 0 < records < self.world_size * (self.batch_size if self.drop_last else 1):
            ranks = f" for each of {self.world_size} ranks" if self.world_size > 1 else ""
            most = records // self.world_size
            instead = [f"a batch_size of at most {most}"] if most else [f"at most {records} ranks"]
            instead += ["drop_last=False"] if self.drop_last and most else []
            raise UsageError(
                f"an epoch of {records} records has no batch with batch_size={self.batch_size}{ranks} and "
                f"drop_last={self.drop_last}; use {' or '.join(instead)}"
            )

    def split(self, start: int) -> EpochSplit:
        whole = RankSplit(self.places, self.batch_size, self.rank, self.world_size, self.drop_last, start)
        return EpochSplit(whole, self.partitions)

    @property
    def partitions(self) -> int:
        return self.shuffle.partitions if self.shuffle else 1

    @property
    def places(self) -> int:
        """The number of places in an epoch's order, without closed gaps and passed steps."""
        passed = sum(stop - start for start, stop in self.passed)
        return sum(self.shard_counts) - passed - (len(self.omission or ()) if self._closes else 0)

    @property
    def _closes(self) -> bool:
        return self.omission is not None and self.omission.closes

    def order(self, epoch: int) -> EpochOrder:
        """Return all record numbers in the order of the epoch, including omitted ones whose gaps are kept."""
        found = epoch_order(self.shard_counts, shuffle=self.shuffle, seed=self.seed, epoch=epoch)
        if self.omission and self._closes:
            found = found.closed(self.omission, epoch)
        return found.passing(self.passed) if self.passed else found

    @property
    def full_batches(self) -> EpochPlan:
        """This plan, with omitted records delivered if their gaps are kept, so that batches are full."""
        return self if self._closes else replace(self, omission=None)

    def delivered(self, numbers: Records, epoch: int) -> Records:
        """Return the numbers at some places of an order, without the omitted ones among them."""
        return numbers if self.omission is None or self._closes else self.omission.kept(numbers, epoch)

    def omitted_places(self, epoch: int) -> Records:
        """Return the places of the omitted records, in stored order."""
        if self.omission is None:
            return NOTHING
        if self.omission.weights is None:
            return self.omission.positions
        places = np.arange(sum(self.shard_counts))
        return places[self.omission.has(places, epoch)]

    def omitted(self, epoch: int) -> Tally:
        """Return the tally of the records that the epoch omits on purpose, over all ranks."""
        found = Tally.of(self.omitted_places(epoch))
        whole = replace(self, passed=()).order(epoch) if self.passed else None
        parts = [self.delivered(whole[start:stop], epoch) for start, stop in self.passed] if whole else []
        return sum(map(Tally.of, parts), found)

    def passing(self, steps: Iterable[int], *, start: int) -> EpochPlan:
        """Return the plan of an epoch that skips these steps, counted from its beginning.

        Raises UsageError for a step that does not exist, or that begins before the place ``start``.
        """
        whole, ranges = replace(self, passed=()).split(0).whole, list(self.passed)
        each = self.world_size * self.batch_size
        ends = (start, *(end for both in ranges for end in both))
        if odd := [end for end in ends if end % each and end != whole.records]:
            raise UsageError(
                f"this epoch continues, or skips steps, at place {odd[0]:,}, which is not a multiple of its steps of "
                f"{each:,} records; skip steps with the previous batch size and world size"
            )
        for step in sorted(set(steps)):
            begin, end = step * each, whole.end(step)
            if not 0 <= begin < whole.stop:
                raise UsageError(f"an epoch has steps 0 to {-(-whole.stop // each) - 1}, not {step}")
            if any(first <= begin and end <= last for first, last in ranges):
                continue
            if begin < start:
                raise UsageError(f"step {step} begins before the place from which this epoch continues")
            ranges.append((begin, end))
        return replace(self, passed=_joined(ranges))

    def outside(self, place: int) -> int:
        """Convert a place in the order without passed steps to one of the epoch."""
        for start, stop in self.passed:
            place += stop - start if place > start else 0
        return place

    def shards(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """Return the order in which this rank reads its shards; None if it may read any at any time."""
        counts, partitions = self.shard_counts, self.split(0).partitions
        return shard_order(counts, shuffle=self.shuffle, seed=self.seed, epoch=epoch, partitions=partitions)

    def identity(self) -> dict[str, Any]:
        """Return the values that determine the order; the dataset's root covers its shards."""
        shuffle = self.shuffle.to_json() if self.shuffle else None
        return {"dataset": self.dataset, "shuffle": shuffle, "seed": self.seed}


class LoadedStep(NamedTuple):
    """A step's batch and record numbers; the last step also has those that the epoch leaves out."""

    step: int
    batch: Any
    delivered: Records
    skipped: Records = NOTHING
    left_out: Records = NOTHING
    omitted: Records = NOTHING


class Epoch:
    """One epoch of one rank, or the rest of it from the place ``start``, and what it has delivered.

    The loader calls :meth:`delivered` for each batch and :meth:`end` after the last.
    """

    def __init__(
        self, plan: EpochPlan, number: int, *, start: int = 0, receipt: Receipt | None = None, origin: int = 0
    ) -> None:
        keyed_bits(Purpose.RECORD_ORDER, seed=plan.seed, epoch=number)  # checks the seed and the number
        self.plan = plan
        self.number = number
        self.start = start
        """The place in the epoch's order where this part begins."""
        self.origin = start if receipt is None else origin
        """The place where the receipt began; 0 if it came with a state."""
        self._split = plan.split(place_within(plan.passed, start))
        self._steps = 0
        self._ended = False
        self._receipt = receipt or Receipt(plan.dataset, number)

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, step: int) -> Records:
        """Return the record numbers of a step, counted from ``start``. Raises IndexError."""
        return self.plan.delivered(self._order.batch(self._split.places(step)), self.number)

    def batches(self) -> Iterator[Records]:
        return map(self.batch, range(len(self)))

    def loaded(self, step: int, batch: Sequence[Any], delivered: Records, skipped: Records) -> LoadedStep:
        if step < len(self) - 1:
            return LoadedStep(step, tuple(batch), delivered, skipped)
        omitted = self.plan.omitted_places(self.number)
        return LoadedStep(step, tuple(batch), delivered, skipped, self._left_out, omitted)

    @cached_property
    def _order(self) -> EpochOrder:
        return self.plan.order(self.number)

    @cached_property
    def _left_out(self) -> Records:
        return self.plan.delivered(self._order[self._split.whole.stop :], self.number)

    @cached_property
    def _omitted(self) -> Tally:
        return self.plan.omitted(self.number)

    def delivered(self, numbers: Records, skipped: list[int]) -> None:
        """Add the next batch to the receipt: its record numbers, and those skipped as bad."""
        self._steps += 1
        self._receipt = self._receipt.add(numbers)
        if skipped:
            self._receipt = self._receipt.skip(skipped)

    def end(self) -> None:
        """Record that the consumer asked for a batch after the last one."""
        self._ended = True

    @property
    def first(self) -> int:
        """The place of the first batch in the order without passed steps."""
        return self._split.whole.start

    @property
    def place(self) -> int:
        """The place in the epoch's order that all ranks have reached after this step."""
        return self.plan.outside(self._reached) if self._steps else self.start

    @property
    def _reached(self) -> int:
        return self._split.whole.end(self._steps - 1) if self._steps else self.first

    @property
    def is_over(self) -> bool:
        """Whether the next batch belongs to the next epoch; true after the same step on all ranks."""
        return self._ended or self._reached == self._split.whole.stop

    @property
    def receipt(self) -> Receipt:
        """The receipt of the records delivered so far and, at the end, of those left out."""
        if not self.is_over:
            return self._receipt
        return self._receipt.leave_out(self._left_out, omitted=self._omitted)

    def state(self) -> dict[str, Any]:
        """Return the epoch's place and receipt as JSON values for :func:`resumed`."""
        return {
            "version": SKIPPING_STATE_VERSION if self.plan.passed else STATE_VERSION,
            **self.plan.identity(),
            "epoch": self.number,
            "start": self.start,
            "place": self.place,
            "rank": self.plan.rank,
            "world_size": self.plan.world_size,
            "receipt": self._receipt.to_json(),
        } | ({"passed": [list(both) for both in self.plan.passed]} if self.plan.passed else {})


def resumed(plan: EpochPlan, state: object) -> Epoch:
    """Continue the epoch of a state, on a plan that may differ in batch size, rank and world size.

    The receipt continues if rank and world size are the same; otherwise a new one begins. Raises UsageError
    if the value is not a state, or is the state of another dataset, order or version.
    """
    if not isinstance(state, dict) or state.get("version") not in (STATE_VERSION, SKIPPING_STATE_VERSION):
        raise UsageError(f"not the state of a loader, or not of version 1 to {SKIPPING_STATE_VERSION}")
    differing = [name for name, value in plan.identity().items() if state.get(name) != value]
    if differing:
        hint = " (records=, classes= and without= count as well)" if "dataset" in differing else ""
        names = " and ".join(differing)
        raise UsageError(f"the state is from a loader with another {names}; use the same{hint}")
    numbers: dict[str, Any] = {name: state.get(name) for name in ("epoch", "place", "rank", "world_size")}
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise UsageError(f"not the state of a loader: its {name} is {value!r}")
    number, place, *ranks = numbers.values()
    try:
        receipt = Receipt.from_json(state.get("receipt"))  # type: ignore[arg-type]
    except (DataError, UnknownVersion) as error:
        raise UsageError(f"not the state of a loader: {error}") from error
    if (receipt.dataset, receipt.epoch) != (plan.dataset, number):
        raise UsageError("not the state of a loader: its receipt is for another epoch or dataset")
    is_same_rank = ranks == [plan.rank, plan.world_size]
    plan = replace(plan, passed=checked_ranges(state.get("passed", []), sum(plan.shard_counts)))
    return Epoch(plan, number, start=place, receipt=receipt if is_same_rank else None)


def place_within(passed: Ranges, place: int) -> int:
    """Convert a place of an epoch to one in the order without these ranges."""
    return place - sum(max(0, min(place, stop) - start) for start, stop in passed)


def _joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Return the ranges in order, with adjacent ones merged."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            start, stop = joined[-1][0], max(stop, joined.pop()[1])
        joined.append((start, stop))
    return tuple(joined)


def checked_ranges(value: object, places: int) -> Ranges:
    """Return the passed ranges of a state. Raises UsageError unless they are as a loader writes them."""
    match value:
        case list() if all(
            isinstance(both, list) and len(both) == 2 and all(type(end) is int for end in both)
            for both in value
        ):
            ranges = tuple((start, stop) for start, stop in value)
            ends = [0, *(end for both in ranges for end in both), places]
            if _joined(list(ranges)) == ranges and ends == sorted(ends):
                return ranges
    raise UsageError(f"not the state of a loader: its passed steps are {value!r}")
