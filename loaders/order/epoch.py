"""One epoch of a dataset: its batches, its receipt, its state, and resuming from a state. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.loaders.order.epoch_order import (
    EpochOrder,
    EpochSplit,
    RankSplit,
    Shuffle,
    epoch_order,
    shard_order,
)
from shardprep.loaders.order.parts import Records
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.order.rng import Purpose, keyed_bits

STATE_VERSION = 1


@dataclass(frozen=True)
class EpochPlan:
    """The parameters of one rank's batches in every epoch; equal plans give equal batches.

    ``dataset`` is the root of its manifest, ``shard_counts`` are the shards' record counts in stored order.
    Raises UsageError where an epoch of any rank would be without a batch, though there are records.
    """

    dataset: str
    shard_counts: tuple[int, ...]
    shuffle: Shuffle | None
    seed: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        records = self.split(0).whole.records
        if 0 < records < self.world_size * (self.batch_size if self.drop_last else 1):
            ranks = f" for each of {self.world_size} ranks" if self.world_size > 1 else ""
            most = records // self.world_size
            instead = [f"a batch_size of at most {most}"] if most else [f"at most {records} ranks"]
            instead += ["drop_last=False"] if self.drop_last and most else []
            raise UsageError(
                f"an epoch of {records} records has no batch with batch_size={self.batch_size}{ranks} and "
                f"drop_last={self.drop_last}; use {' or '.join(instead)}"
            )

    def split(self, start: int) -> EpochSplit:
        """Return this rank's batches of an epoch that continues at ``start``."""
        records = sum(self.shard_counts)
        whole = RankSplit(records, self.batch_size, self.rank, self.world_size, self.drop_last, start)
        return EpochSplit(whole, self.shuffle.partitions if self.shuffle else 1)

    def order(self, epoch: int) -> EpochOrder:
        """Return all record numbers in the order of the epoch, of which a window is computed at a time."""
        return epoch_order(self.shard_counts, shuffle=self.shuffle, seed=self.seed, epoch=epoch)

    def shards(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """The order in which this rank reads shards; None where it reads from all its own at any time."""
        mine = self.split(0).partitions
        return shard_order(
            self.shard_counts, shuffle=self.shuffle, seed=self.seed, epoch=epoch, partitions=mine
        )

    def identity(self) -> dict[str, Any]:
        """The values on which the order depends; a dataset's root covers its shards."""
        shuffle = self.shuffle.to_json() if self.shuffle else None
        return {"dataset": self.dataset, "shuffle": shuffle, "seed": self.seed}


class Epoch:
    """One epoch of one rank, or the rest of one, and what was delivered of it.

    The loader calls :meth:`delivered` for each batch, and :meth:`end` after the last one. Raises UsageError
    for a number or a start that no epoch of the plan has.
    """

    def __init__(
        self, plan: EpochPlan, number: int, *, start: int = 0, receipt: Receipt | None = None
    ) -> None:
        keyed_bits(Purpose.RECORD_ORDER, seed=plan.seed, epoch=number)  # checks the seed and the number
        self.plan = plan
        self.number = number
        self._split = plan.split(start)
        self._steps = 0
        self._ended = False
        self._receipt = receipt or Receipt(plan.dataset, number)

    def __len__(self) -> int:
        return len(self._split)

    def batches(self) -> Iterator[Records]:
        """Yield the record numbers of each batch."""
        for step in range(len(self)):
            yield self._order.batch(self._split.places(step))

    @cached_property
    def _order(self) -> EpochOrder:
        return self.plan.order(self.number)

    @cached_property
    def _left_out(self) -> Records:
        return self._order[self._split.whole.stop :]

    def delivered(self, numbers: Records, skipped: list[int]) -> None:
        """Note the delivery of the next batch: record numbers ``numbers``, and those that were skipped."""
        self._steps += 1
        self._receipt = self._receipt.add(numbers).skip(skipped)

    def end(self) -> None:
        """Note that the consumer asked for a batch after the last one."""
        self._ended = True

    @property
    def start(self) -> int:
        """The place in the epoch's order where this part of it begins."""
        return self._split.whole.start

    @property
    def place(self) -> int:
        """The place in the epoch's order that all ranks reach with this step."""
        return self._split.whole.end(self._steps - 1) if self._steps else self.start

    @property
    def is_over(self) -> bool:
        """Whether the next batch is of the next epoch; true after the same step for all ranks."""
        return self._ended or self.place == self._split.whole.stop

    @property
    def receipt(self) -> Receipt:
        """The receipt of what was delivered so far; at the end, also of what was left out."""
        if self.place < self._split.whole.stop:
            return self._receipt
        return self._receipt.leave_out(self._left_out)

    def state(self) -> dict[str, Any]:
        """Return the epoch's place and receipt as JSON values; :func:`resumed` continues from there."""
        return {
            "version": STATE_VERSION,
            **self.plan.identity(),
            "epoch": self.number,
            "start": self.start,
            "place": self.place,
            "rank": self.plan.rank,
            "world_size": self.plan.world_size,
            "receipt": self._receipt.to_json(),
        }


def resumed(plan: EpochPlan, state: object) -> Epoch:
    """Return the epoch of a state, on a plan that may have another batch size, rank and world size.

    With the same rank and world size the receipt continues. Otherwise a new one begins at the state's place,
    to be merged with the receipts of the earlier ranks. Raises UsageError for a value that is no state, or
    the state of another dataset, order or version.
    """
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise UsageError(f"not the state of a loader, or not of version {STATE_VERSION}")
    differing = [name for name, value in plan.identity().items() if state.get(name) != value]
    if differing:
        hint = " (records= and classes= count as well)" if "dataset" in differing else ""
        raise UsageError(
            f"the state is from a loader with another {' and '.join(differing)}; use the same{hint}"
        )
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
        raise UsageError("not the state of a loader: its receipt is of another epoch or dataset")
    is_same_rank = ranks == [plan.rank, plan.world_size]
    return Epoch(plan, number, start=place, receipt=receipt if is_same_rank else None)


class LoadedStep(NamedTuple):
    """A step's batch, and its record numbers: those in it, and the bad ones that were skipped.

    ``left_out`` are those that the plan leaves out of its epoch, over all ranks; only the last step has them.
    """

    step: int
    batch: tuple[Any, ...]
    delivered: Records
    skipped: Records
    left_out: Records


class EpochSteps:
    """The steps of an epoch from its beginning, or of its rest from the place ``start``, in any order."""

    def __init__(self, plan: EpochPlan, number: int, *, start: int = 0) -> None:
        self.number = number
        self._order = plan.order(number)
        self._split = plan.split(start)

    def __len__(self) -> int:
        return len(self._split)

    def batches(self, steps: Iterable[int], drawn: deque[int]) -> Iterator[Records]:
        """Yield the record numbers of each step and append it to ``drawn``.

        Raises IndexError for a step that the epoch does not have.
        """
        for step in steps:
            places = self._split.places(step)
            drawn.append(step)
            yield self._order.batch(places)

    def loaded(self, step: int, batch: Sequence[Any], delivered: Records, skipped: Records) -> LoadedStep:
        """Return a step's batch with its record numbers."""
        start = self._split.whole.stop if step == len(self._split) - 1 else len(self._order)
        return LoadedStep(step, tuple(batch), delivered, skipped, self._order[start:])
