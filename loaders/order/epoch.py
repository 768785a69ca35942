"""One epoch of a dataset: its order, batches, shards, receipt and state. Does no I/O.

The order, and each rank's share of it, is a pure function of the shard sizes and the seed. A record number is
a position in the dataset's index. Only a window of the order is computed at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.json_record import parse_natural
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.progress import byte_count, check_int
from shardprep.loaders.order.parts import (
    MAX_RECORDS,
    NO_OMISSION,
    NO_RECORDS,
    GaplessOrder,
    Omission,
    PartOrder,
    Ranges,
    Records,
    partition_shards,
    partition_share,
)
from shardprep.loaders.order.receipt import Receipt, Tally


class Shuffle(ABC):
    """How far a record may move from its stored place. Frozen, picklable, compared by value.

    Each of the ``partitions`` is shuffled separately.
    """

    partitions: int = 1

    def in_records(self, mean_record_bytes: float) -> Shuffle:
        """Return the same shuffle with its window counted in records of this mean size."""
        return self

    @abstractmethod
    def window_of(self, records: int) -> int:
        """Return the window over a dataset of ``records``; all of them for a full permutation."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the shuffle as JSON values, for a loader's state; :meth:`from_json` reads it."""

    @staticmethod
    def from_json(value: object) -> Shuffle:
        """Return the shuffle that ``to_json`` described. Raises ValueError or UsageError."""
        match value:
            case {"kind": "global", **rest} if not rest:
                return GlobalShuffle()
            case {"kind": "local", "window": int() as window, **rest} if rest.keys() <= {"partitions"}:
                shuffle = LocalShuffle(window, **cast("dict[str, int]", rest))
                if shuffle.to_json() == value:
                    return shuffle
        raise ValueError(f"{value!r} is not a shuffle")


@dataclass(frozen=True)
class GlobalShuffle(Shuffle):
    """A permutation of the whole dataset: the best shuffle, with random reads."""

    def window_of(self, records: int) -> int:
        return records

    def to_json(self) -> dict[str, Any]:
        return {"kind": "global"}


@dataclass(frozen=True)
class LocalShuffle(Shuffle):
    """Shards in random order, their records displaced by less than ``window`` places.

    ``window`` is a number of records, or bytes as text (``"2GiB"``, ``"512MB"``): of encoded images or, for a
    dataset without any, of its files. At any moment the reads are at most ``window`` places apart. Away from
    both ends a record moves by at most about half the window, a quarter on average, with a standard deviation
    of 0.29 windows: a window of 3 n mixes as widely as tensorpack's buffer of n. There is no delay to fill
    the window. A window of at least the dataset's size equals a :class:`GlobalShuffle`, within each partition
    if there are several.

    With ``partitions``, each rank reads only its own shards, the same in every epoch and for every seed. The
    shards are divided into this many partitions with equal numbers of records (a shard at a boundary belongs
    to both). Each is shuffled separately, in its share of the window, and supplies an equal share of every
    global step. So the global steps are the same for any number of ranks that divides the number of
    partitions or is a multiple of it; the Loader rejects other numbers of ranks, and batch sizes that would
    give partitions unequal shares. By default every rank reads every shard.

    Raises UsageError for a window or partitions below 1.
    """

    window: int | str
    partitions: int = 1

    def __post_init__(self) -> None:
        amount = self._amount()
        object.__setattr__(self, "window", self.window if isinstance(self.window, str) else amount)
        object.__setattr__(self, "partitions", check_int(self.partitions, "partitions", least=1))

    def __repr__(self) -> str:  # stored in the states of flows
        partitions = f", partitions={self.partitions}" if self.partitions > 1 else ""
        return f"LocalShuffle(window={self.window!r}{partitions})"

    def in_records(self, mean_record_bytes: float) -> LocalShuffle:
        if isinstance(self.window, int):
            return self
        return replace(self, window=max(1, int(self._amount() / max(1.0, mean_record_bytes))))

    def window_of(self, records: int) -> int:
        return min(int(self.window), records)

    def to_json(self) -> dict[str, Any]:
        values = {"kind": "local", "window": self.window}
        return values if self.partitions == 1 else values | {"partitions": self.partitions}

    def _amount(self) -> int:
        """The window's number of records or bytes. Raises UsageError."""
        return byte_count(self.window, of="a shuffle window")


class EpochOrder:
    """All record numbers in the order of an epoch, over all ranks, round-robin over the partitions."""

    def __init__(self, parts: Iterable[PartOrder]) -> None:
        self.parts: list[PartOrder] = list(parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, places: slice) -> Records:
        start, stop, _ = places.indices(len(self))
        numbers, partitions = np.empty(max(0, stop - start), np.int64), len(self.parts)
        for number in range(partitions):
            part = range(
                partition_share(start, number, partitions), partition_share(stop, number, partitions)
            )
            numbers[(number - start) % partitions :: partitions] = self.batch({number: part})
        return numbers

    def batch(self, places: Mapping[int, range]) -> Records:
        """Return the record numbers at these places of each partition, concatenated."""
        numbers = [self.parts[number][part.start : part.stop] for number, part in places.items()]
        return numbers[0] if len(numbers) == 1 else np.concatenate(numbers)

    def numbers_at(self, places: Iterable[int]) -> Iterator[int]:
        if len(self.parts) == 1:
            yield from self.parts[0].numbers_at(places)
            return
        for place in places:
            row, number = divmod(place, len(self.parts))
            yield from self.parts[number].numbers_at((row,))


@dataclass(frozen=True)
class RankSplit:
    """The batches of one rank, as ranges of places in the epoch's order.

    A global step takes ``world_size * batch_size`` places; rank r has the r-th ``batch_size`` of them.
    Without ``drop_last``, the places after the last full step are split as evenly as possible. An epoch can
    continue from ``start``, the end of a global step of any world size.
    """

    records: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    start: int = 0
    step_records: int = field(init=False, repr=False)  # of all ranks
    full_steps: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.records:
            raise UsageError(f"an epoch of {self.records} records cannot continue at {self.start}")
        object.__setattr__(self, "step_records", self.world_size * self.batch_size)
        object.__setattr__(self, "full_steps", (self.records - self.start) // self.step_records)

    @property
    def stop(self) -> int:
        """The place where the epoch ends for all ranks; with ``drop_last`` it may be before ``records``."""
        return self._remainder_start if self.drop_last else self.records

    def __len__(self) -> int:
        return self.full_steps + (not self.drop_last and len(self._remainder) > 0)

    def batch(self, step: int) -> range:
        """Return the places of this rank's batch of a step of 0 .. len - 1, counted from ``start``."""
        if step == self.full_steps:
            return self._remainder
        first = self.start + step * self.step_records + self.rank * self.batch_size
        return range(first, first + self.batch_size)

    def end(self, step: int) -> int:
        """Return the place that all ranks have reached after this step; a state stores it as ``start``."""
        return min(self.start + (step + 1) * self.step_records, self.stop)

    def steps_of(self, places: Records) -> Records:
        """Return the step of each place; -1 for places of other ranks or outside all steps."""
        steps, within = np.divmod(places - self.start, self.step_records)
        first = self.rank * self.batch_size
        is_own = (within >= first) & (within < first + self.batch_size)
        steps[~is_own | (steps < 0) | (steps >= self.full_steps)] = -1
        if not self.drop_last:
            rest = self._remainder
            steps[(places >= rest.start) & (places < rest.stop)] = self.full_steps
        return steps

    def steps_reached(self, places: Records) -> Records:
        """Return the global step that contains each place, clipped to the epoch's steps."""
        return np.clip((places - self.start) // self.step_records, 0, max(0, len(self) - 1))

    @property
    def _remainder_start(self) -> int:
        return self.start + self.full_steps * self.step_records

    @property
    def _remainder(self) -> range:
        share, extra = divmod(self.records - self._remainder_start, self.world_size)
        first = self._remainder_start + self.rank * share + min(self.rank, extra)
        return range(first, first + share + (self.rank < extra))


class EpochSplit:
    """The batches of one rank, as places in the partitions of an epoch's order.

    Every partition supplies an equal share of each global step. A rank takes the shares of adjacent
    partitions, or an equal part of one partition's share, so a global step has the same records for any
    number of ranks. ``whole`` splits the epoch's places. Raises UsageError for unequal shares.
    """

    def __init__(self, whole: RankSplit, partitions: int) -> None:
        world_size, batch_size = whole.world_size, whole.batch_size
        sharing, owned = max(1, world_size // partitions), max(1, partitions // world_size)
        if owned * world_size != sharing * partitions:
            raise UsageError(
                f"{partitions} partitions cannot be shared equally by {world_size} ranks; use a world_size "
                "that divides the number of partitions or is a multiple of it"
            )
        if batch_size % owned:
            raise UsageError(
                f"a batch_size of {batch_size} cannot be shared equally by the {owned} partitions of "
                f"each of {world_size} ranks; use a multiple of {owned}"
            )
        first = whole.rank * partitions // world_size
        self.whole = whole
        self.partitions = range(first, first + owned)
        self.parts = {
            number: replace(
                whole,
                records=partition_share(whole.records, number, partitions),
                batch_size=batch_size // owned,
                rank=whole.rank % sharing,
                world_size=sharing,
                start=partition_share(whole.start, number, partitions),
            )
            for number in self.partitions
        }
        self._steps = len(whole) if whole.drop_last else max(map(len, self.parts.values()))

    def __len__(self) -> int:
        return self._steps

    def places(self, step: int) -> dict[int, range]:
        """Return the places of this rank's batch of a step, by partition. Raises IndexError."""
        if not 0 <= step < self._steps:
            raise IndexError(f"there is no step {step}; the epoch has {self._steps}, numbered from 0")
        return {number: part.batch(step) for number, part in self.parts.items() if step < len(part)}


STATE_VERSION, SKIPPING_STATE_VERSION = 1, 2  # a release without skipped steps must refuse the latter


@dataclass(frozen=True)
class EpochPlan:
    """The parameters of one rank's batches in every epoch; equal plans give equal batches.

    ``dataset`` is the root of its manifest. ``omission`` has the records that no epoch delivers. ``passed``
    has ascending ranges of places that one epoch skips: whole steps of all ranks. Raises UsageError if there
    are records, but some rank would get no batch, and above MAX_RECORDS.
    """

    dataset: str
    shard_counts: tuple[int, ...]
    shuffle: Shuffle | None
    seed: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    omission: Omission = NO_OMISSION
    passed: Ranges = ()

    def __post_init__(self) -> None:
        if (records := sum(self.shard_counts)) > MAX_RECORDS:
            raise UsageError(f"{records:,} records are more than one order can hold ({MAX_RECORDS:,})")
        if self.omission and self.omission.closes_gaps and (self.omission.weights or self.partitions > 1):
            raise UsageError(
                'gaps="close" is not possible with weights or the partitions of a shuffle; use gaps="keep"'
            )
        records = self.split(0).whole.records  # also checks the partitions
        if not self.passed and 0 < records < self.partitions:
            raise UsageError(f"{records:,} records are too few for {self.partitions} partitions; use fewer")
        if not self.passed and 0 < records < self.world_size * (self.batch_size if self.drop_last else 1):
            remedy = "a smaller batch_size, fewer ranks, or drop_last=False (in a command --keep-last)"
            raise UsageError(
                f"an epoch of {records:,} records has no batch with batch_size={self.batch_size}, world_size={self.world_size} "
                f"and drop_last={self.drop_last}; use {remedy if self.drop_last else 'fewer ranks'}"
            )

    def split(self, start: int) -> EpochSplit:
        whole = RankSplit(self.places, self.batch_size, self.rank, self.world_size, self.drop_last, start)
        return EpochSplit(whole, self.partitions)

    @property
    def partitions(self) -> int:
        return self.shuffle.partitions if self.shuffle else 1

    @property
    def window(self) -> int:
        """The window within one partition, in places; 0 for the stored order."""
        window = self.shuffle.window_of(sum(self.shard_counts)) if self.shuffle else 0
        return math.ceil(window / self.partitions)

    @property
    def places(self) -> int:
        """The number of places in an epoch's order, without closed gaps and passed steps."""
        passed = sum(stop - start for start, stop in self.passed)
        return sum(self.shard_counts) - passed - (len(self.omission) if self.omission.closes_gaps else 0)

    def order(self, epoch: int) -> EpochOrder:
        """Return all record numbers in the order of the epoch, including omitted ones whose gaps are kept."""
        window, partitions = self.window, partition_shards(self.shard_counts, self.partitions)
        parts: list[PartOrder] = [part.order(window, seed=self.seed, epoch=epoch) for part in partitions]
        if self.omission and self.omission.closes_gaps:  # with a single part
            parts = [GaplessOrder(part, self.omission.find_gaps(part, epoch)) for part in parts]
        if self.passed:
            for number, part in enumerate(parts):
                ranges = ([partition_share(end, number, len(parts)) for end in ends] for ends in self.passed)
                parts[number] = GaplessOrder(part, np.concatenate([np.arange(*ends) for ends in ranges]))
        return EpochOrder(parts)

    @property
    def with_full_batches(self) -> EpochPlan:
        """This plan, with omitted records delivered if their gaps are kept, so that batches are full."""
        return self if self.omission.closes_gaps else replace(self, omission=NO_OMISSION)

    def drop_omitted(self, numbers: Records, epoch: int) -> Records:
        """Return the numbers at some places of an order, without the omitted ones among them."""
        return numbers if self.omission.closes_gaps else numbers[~self.omission.mask_at(numbers, epoch)]

    def omitted_places(self, epoch: int) -> Records:
        """Return the places of the omitted records, in stored order."""
        if self.omission.weights is None:
            return self.omission.positions
        places = np.arange(sum(self.shard_counts))
        return places[self.omission.mask_at(places, epoch)]

    def omitted_tally(self, epoch: int) -> Tally:
        """Return the tally of the records that the epoch omits on purpose, over all ranks."""
        omitted = Tally.of(self.omitted_places(epoch))
        whole = replace(self, passed=()).order(epoch) if self.passed else None
        parts = [self.drop_omitted(whole[start:stop], epoch) for start, stop in self.passed] if whole else []
        return sum(map(Tally.of, parts), omitted)

    def skip_steps(self, steps: Iterable[int], *, start: int) -> EpochPlan:
        """Return the plan of an epoch that skips these steps, counted from its beginning.

        Raises UsageError for a step that does not exist, or that begins before the place ``start``.
        """
        whole = replace(self, passed=()).split(0).whole
        size = whole.step_records
        ends = (start, *chain.from_iterable(self.passed))
        if uneven := [end for end in ends if end % size and end != whole.records]:
            raise UsageError(
                f"this epoch continues, or skips steps, at place {uneven[0]:,}, which is not a multiple of its steps of "
                f"{size:,} records; skip steps with the previous batch size and world size"
            )
        begins = {begin for first, last in self.passed for begin in range(first, last, size)}
        for step in sorted(set(steps)):
            begin = step * size
            if not 0 <= begin < whole.stop:
                raise UsageError(f"an epoch has steps 0 to {-(-whole.stop // size) - 1}, not {step}")
            if begin < start and begin not in begins:
                raise UsageError(f"step {step} begins before the place from which this epoch continues")
            begins.add(begin)
        edges = sorted(begins ^ {min(begin + size, whole.records) for begin in begins})  # none between steps
        return replace(self, passed=tuple(zip(edges[::2], edges[1::2], strict=True)))

    def add_passed(self, place: int) -> int:
        """Convert a place in the order without passed steps to one of the epoch."""
        for start, stop in self.passed:
            place += stop - start if place > start else 0
        return place

    def shard_order(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """Return the order in which this rank reads its shards; None if it may read any at any time."""
        own, window = self.split(0).partitions, self.window
        parts = partition_shards(self.shard_counts, self.partitions)[own.start : own.stop]
        if any(window >= part.records for part in parts):
            return None
        runs = [(part, part.runs(window, seed=self.seed, epoch=epoch)) for part in parts]
        begins = np.concatenate([np.cumsum(part.counts[run]) - part.counts[run] for part, run in runs])
        read = np.concatenate([part.shards[run] for part, run in runs])[np.argsort(begins, kind="stable")]
        _, first_reads = np.unique(read, return_index=True)  # a shard may have records in two partitions
        shards: npt.NDArray[np.int64] = read[np.sort(first_reads)]
        return shards

    def identity(self) -> dict[str, Any]:
        """Return the values that determine the order; the dataset's root covers its shards."""
        shuffle = self.shuffle.to_json() if self.shuffle else None
        return {"dataset": self.dataset, "shuffle": shuffle, "seed": self.seed}


class LoadedStep(NamedTuple):
    """A step's batch and record numbers; the last step also has those that the epoch leaves out."""

    step: int
    batch: Any
    delivered: Records
    skipped: Records = NO_RECORDS
    left_out: Records = NO_RECORDS
    omitted: Records = NO_RECORDS


class Epoch:
    """One epoch of one rank, or the rest of it from the place ``start``, and what it has delivered.

    The loader calls :meth:`record_delivery` for each batch and :meth:`end` after the last.
    """

    def __init__(
        self,
        plan: EpochPlan,
        number: int,
        *,
        start: int = 0,
        receipt: Receipt | None = None,
        origin: int = 0,
        since: int = 0,
    ) -> None:
        self.plan = plan
        self.number = check_int(number, "epoch", least=0, most=(1 << 64) - 1)
        self.start = start
        """The place in the epoch's order where this part begins."""
        self.origin = start if receipt is None else origin
        """The place where the receipt began; 0 if it came with the state of an older release."""
        self.since = since
        """The place from which batch size and world size have been the same."""
        self._split = plan.split(subtract_passed(plan.passed, start))
        self._steps = 0
        self._ended = False
        self._receipt = receipt or Receipt(plan.dataset, self.number)

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, step: int) -> Records:
        """Return the record numbers of a step, counted from ``start``. Raises IndexError."""
        return self.plan.drop_omitted(self._order.batch(self._split.places(step)), self.number)

    def batches(self) -> Iterator[Records]:
        return map(self.batch, range(len(self)))

    def make_step(self, step: int, batch: Sequence[Any], delivered: Records, skipped: Records) -> LoadedStep:
        if step < len(self) - 1:
            return LoadedStep(step, tuple(batch), delivered, skipped)
        omitted = self.plan.omitted_places(self.number)
        return LoadedStep(step, tuple(batch), delivered, skipped, self._left_out, omitted)

    @cached_property
    def _order(self) -> EpochOrder:
        return self.plan.order(self.number)

    @cached_property
    def _left_out(self) -> Records:
        return self.plan.drop_omitted(self._order[self._split.whole.stop :], self.number)

    @cached_property
    def _omitted(self) -> Tally:
        return self.plan.omitted_tally(self.number)

    def record_delivery(self, numbers: Records, skipped: list[int]) -> None:
        """Add the next batch to the receipt: its record numbers, and those skipped as bad."""
        receipt = self._receipt.add(numbers)
        if skipped:
            receipt = receipt.skip(skipped)
        self._steps, self._receipt = self._steps + 1, receipt  # no interruption between the two

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
        return self.plan.add_passed(self._reached) if self._steps else self.start

    @property
    def _reached(self) -> int:
        return self._split.whole.end(self._steps - 1)

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
        """Return the epoch's place and receipt as JSON values for :func:`resume_epoch`.

        A new loader's state has all names, because PyTorch's DCP restores only those that it finds there.
        """
        return {
            "version": SKIPPING_STATE_VERSION if self.plan.passed else STATE_VERSION,
            **self.plan.identity(),
            "epoch": self.number,
            "start": self.start,
            "place": self.place,
            "rank": self.plan.rank,
            "world_size": self.plan.world_size,
            "receipt": self._receipt.to_json(),
            "batch_size": self.plan.batch_size,
            "origin": self.origin,
            "since": self.since,
            "passed": list(map(list, self.plan.passed)),
        }


def resume_epoch(plan: EpochPlan, state: object) -> Epoch:
    """Continue the epoch of a state, on a plan that may differ in batch size, rank and world size.

    The receipt continues if rank and world size are the same; otherwise a new one begins. Raises UsageError
    if the value is not a state, or is the state of another dataset, order or version.
    """
    if not isinstance(state, dict) or state.get("version") not in (STATE_VERSION, SKIPPING_STATE_VERSION):
        raise UsageError(f"not the state of a loader, or not of version 1 to {SKIPPING_STATE_VERSION}")
    differing = [name for name, value in plan.identity().items() if state.get(name) != value]
    if differing:
        hint = " (weights=, records=, classes= and without= count as well)" if "dataset" in differing else ""
        names = " and ".join(differing)
        raise UsageError(f"the state is from a loader with another {names}; use the same{hint}")
    try:
        number, place, *ranks = (
            parse_natural(state[name]) for name in ("epoch", "place", "rank", "world_size")
        )
        origin, since = (parse_natural(state.get(name, 0)) for name in ("origin", "since"))
        receipt = Receipt.from_json(state["receipt"])
    except (DataError, UnknownVersion, KeyError, ValueError) as error:
        raise UsageError(f"not the state of a loader: {error}") from error
    if (receipt.dataset, receipt.epoch) != (plan.dataset, number):
        raise UsageError("not the state of a loader: its receipt is for another epoch or dataset")
    if (ranks[1], state.get("batch_size", plan.batch_size)) != (plan.world_size, plan.batch_size):
        since = place
    plan = replace(plan, passed=parse_ranges(state.get("passed", []), sum(plan.shard_counts)))
    continued = receipt if ranks == [plan.rank, plan.world_size] else None
    return Epoch(plan, number, start=place, receipt=continued, origin=origin, since=since)


def subtract_passed(passed: Ranges, place: int) -> int:
    """Convert a place of an epoch to one in the order without these ranges."""
    return place - sum(max(0, min(place, stop) - start) for start, stop in passed)


def parse_ranges(value: object, places: int) -> Ranges:
    """Return the passed ranges of a state. Raises UsageError unless they are as a loader writes them."""
    with suppress(TypeError, ValueError):
        ranges = tuple(
            (parse_natural(start), parse_natural(stop)) for start, stop in cast("Iterable[Any]", value)
        )
        ends = list(chain.from_iterable(ranges))
        if ends == sorted(set(ends)) and max(ends, default=0) <= places:
            return ranges
    raise UsageError(f"not the state of a loader: its passed steps are {value!r}")


EXACT_RECORDS = 1 << 22  # for more, computing the order takes seconds, and the bounds are close
DEVIATIONS = 7  # a sum of random numbers exceeds this distance from its mean once in 10^11 cases
PLACES_AT_ONCE = 1 << 18  # computed at a time
CHECKED_EPOCHS = 1000  # more than almost any training has
CHECKED_PLACES = 1 << 21  # of all checked epochs together: some 0.3 s
CHECKED_EXACTLY = 1 << 16  # records; for more, bounds allow for more epochs in this time


@dataclass(frozen=True, eq=False)
class ShardUses:
    """The ``shards`` of an epoch in order of first use, and the steps of their first and last use."""

    shards: Records
    firsts: Records
    lasts: Records

    def at(self, step: int) -> Records:
        """Return the shards in use at a step."""
        begun = int(np.searchsorted(self.firsts, step, side="right"))
        shards: Records = self.shards[:begun][self.lasts[:begun] >= step]
        return shards

    def boundaries(self) -> tuple[Records, Records]:
        """Return the steps, ascending, of every shard's first and last use, and the shards."""
        steps = np.concatenate([self.firsts, self.lasts])
        order = np.argsort(steps, kind="stable")
        return steps[order], np.concatenate([self.shards, self.shards])[order]

    def peak(self, sizes: npt.NDArray[np.int64]) -> int:
        """Return the largest total size of the shards in use at one step."""
        changes = np.zeros(int(self.lasts.max(initial=0)) + 2, np.int64)
        np.add.at(changes, self.firsts, sizes[self.shards])
        np.subtract.at(changes, self.lasts + 1, sizes[self.shards])
        return int(np.cumsum(changes).max())


def peak_use(plan: EpochPlan, sizes: npt.NDArray[np.int64]) -> int:
    """Return the largest total size of the shards in use at one step of the first epochs.

    Covers up to 1,000 epochs, as many as take a few tenths of a second, but at least two.
    """
    records = sum(plan.shard_counts)
    is_exact = records <= CHECKED_EXACTLY or plan.places < records
    # in places: the bounds of a shard take as long as the order of four
    work = max(1, plan.places) if is_exact else 1000 + 4 * len(sizes)
    epochs = range(max(2, min(CHECKED_EPOCHS, CHECKED_PLACES // work)))
    return max(shard_uses(plan, epoch, exact_records=CHECKED_EXACTLY).peak(sizes) for epoch in epochs)


def shard_uses(
    plan: EpochPlan, epoch: int, *, start: int = 0, exact_records: int = EXACT_RECORDS
) -> ShardUses:
    """Return the shard uses of an epoch that continues at the place ``start``.

    The steps are bounds above ``exact_records`` records, and if the window covers a whole partition.
    """
    shards = len(plan.shard_counts)
    firsts, lasts = np.full(shards, np.iinfo(np.int64).max), np.full(shards, -1)
    steps = len(plan.split(start))
    for part_shards, begins, ends in _partition_uses(plan, epoch, start, exact_records) if steps else ():
        np.minimum.at(firsts, part_shards, begins)
        np.maximum.at(lasts, part_shards, np.minimum(ends, steps - 1))
    lasts[firsts >= steps] = -1  # a partition may have one step more than the epoch
    used = np.flatnonzero(lasts >= 0)
    used = used[np.argsort(firsts[used], kind="stable")]
    return ShardUses(used, firsts[used], lasts[used])


def _partition_uses(
    plan: EpochPlan, epoch: int, start: int, exact_records: int
) -> Iterator[tuple[Records, Records, Records]]:
    """Yield shards with their first and last steps, for parts of each partition of this rank.

    Bounds follow from the places: the record at place i of the stream has a key in i .. i + window, and a
    key's rank is a sum of random numbers with a known mean and a deviation below sqrt(window / 6).
    """
    split, records = plan.split(start), sum(plan.shard_counts)
    window = max(1, plan.window)
    partitions = partition_shards(plan.shard_counts, plan.partitions)
    for number, part in split.parts.items():
        partition = partitions[number]
        if window >= partition.records:
            shards = partition.shards[partition.counts > 0] if len(part) else partition.shards[:0]
            yield shards, np.zeros_like(shards), np.full_like(shards, len(part) - 1)
        elif records > exact_records and plan.places == records:
            runs = partition.runs(plan.window, seed=plan.seed, epoch=epoch)
            counts = partition.counts[runs]
            stops = np.cumsum(counts)
            margin = DEVIATIONS * (window / 6) ** 0.5 + 1 if window > 1 else 0
            firsts = _mean_rank(stops - counts, window, partition.records) - margin
            lasts = _mean_rank(stops - 1 + window, window, partition.records) + margin
            used = (counts > 0) & (lasts >= part.start) & (firsts < part.stop)
            begins, ends = (np.floor(each[used]).astype(np.int64) for each in (firsts, lasts))
            yield partition.shards[runs][used], part.steps_reached(begins), part.steps_reached(ends)
        else:
            order, shard_ends = plan.order(epoch), np.cumsum(plan.shard_counts)
            for begin in range(part.start, part.stop, PLACES_AT_ONCE):
                places = range(begin, min(begin + PLACES_AT_ONCE, part.stop))
                steps = part.steps_of(np.arange(begin, places.stop))
                used = (steps >= 0) & (steps < len(split))
                shards = np.searchsorted(shard_ends, order.batch({number: places})[used], side="right")
                yield shards, steps[used], steps[used]


def _mean_rank(keys: Records, window: int, count: int) -> npt.NDArray[np.float64]:
    """The mean number of keys below each of ``keys``, where key i is uniform in i .. i + ``window``."""
    return _ramp_area(keys, window) - _ramp_area(keys - count, window)


def _ramp_area(lengths: Records, window: int) -> npt.NDArray[np.float64]:
    """The area under a ramp from 0 to 1 over ``window``, then constant."""
    rising = np.clip(lengths, 0, window)
    return rising**2 / (2 * window) + np.maximum(lengths - window, 0)
