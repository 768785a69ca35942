"""One pass over a dataset: its batches, its receipt, where it is, and how to go on from there. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.errors import DataError, UnknownVersion, UsageError
from .order import RankSplit, Records, Shuffle, epoch_order, shard_order
from .receipt import Receipt
from .rng import Purpose, keyed_bits

STATE_VERSION = 1


@dataclass(frozen=True)
class EpochPlan:
    """What decides the batches that one rank gets in every epoch; equal plans give equal batches.

    ``dataset`` is the root of its manifest, ``shard_counts`` are its shards' records in stored order.
    """

    dataset: str
    shard_counts: tuple[int, ...]
    shuffle: Shuffle | None
    seed: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    def split(self, start: int) -> RankSplit:
        """This rank's batches of an epoch that is at ``start`` already."""
        records = sum(self.shard_counts)
        return RankSplit(records, self.batch_size, self.rank, self.world_size, self.drop_last, start)

    def order(self, epoch: int) -> Records:
        """All record numbers in the order of the epoch: 8 bytes for each."""
        return epoch_order(self.shard_counts, shuffle=self.shuffle, seed=self.seed, epoch=epoch)

    def shards(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """The order in which shards are read through, None where records are read from all of them."""
        return shard_order(self.shard_counts, shuffle=self.shuffle, seed=self.seed, epoch=epoch)


class Epoch:
    """One epoch of one rank, or what is left of one, and what was delivered of it.

    It is told of each batch by :meth:`delivered`, and by :meth:`end` that more was asked for.
    Raises UsageError for a number or a start that no epoch of the plan has.
    """

    def __init__(
        self, plan: EpochPlan, number: int, *, start: int = 0, receipt: Receipt | None = None
    ) -> None:
        keyed_bits(Purpose.RECORD_ORDER, seed=plan.seed, epoch=number)  # refuses what cannot be drawn from
        self.plan = plan
        self.number = number
        self._split = plan.split(start)
        self._steps = 0
        self._ended = False
        self._receipt = receipt or Receipt(plan.dataset, number)
        self._left_out: Records = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._split)

    def batches(self) -> Iterator[Records]:
        """The record numbers of each batch. The order of the epoch lives as long as this iterator."""
        order = self.plan.order(self.number)
        self._left_out = order[self._split.stop :].copy()
        for step in range(len(self)):
            places = self._split.batch(step)
            yield order[places.start : places.stop]

    def delivered(self, numbers: Records, skipped: list[int]) -> None:
        """The next batch is the consumer's: these records, without those that were skipped."""
        self._steps += 1
        self._receipt = self._receipt.add(numbers).skip(skipped)

    def end(self) -> None:
        """The consumer knows that this rank has no more batches."""
        self._ended = True

    @property
    def place(self) -> int:
        """The place of the epoch's order that all ranks reach with this step."""
        return self._split.end(self._steps - 1) if self._steps else self._split.start

    @property
    def is_over(self) -> bool:
        """Whether to go on means to begin the next epoch: in the same step for all ranks."""
        return self._ended or self.place == self._split.stop

    @property
    def receipt(self) -> Receipt:
        """What was delivered so far; at the end, also what was left out."""
        if self.place < self._split.stop:
            return self._receipt
        return self._receipt.leave_out(self._left_out)

    def state(self) -> dict[str, Any]:
        """Where this epoch is, in a few numbers; :func:`resumed` goes on from there."""
        return {
            "version": STATE_VERSION,
            **_identity(self.plan),
            "epoch": self.number,
            "place": self.place,
            "rank": self.plan.rank,
            "world_size": self.plan.world_size,
            "receipt": self._receipt.to_json(),
        }


def resumed(plan: EpochPlan, state: object) -> Epoch:
    """The epoch of a state, on a plan whose batch size, rank and world size may be others.

    With the same rank of the same world the receipt goes on too; otherwise a new one begins at the
    state's place, to be merged with those of who came before. Raises UsageError for what is no
    state, or the state of another dataset, order or version.
    """
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise UsageError(f"not the state of a loader, or not of version {STATE_VERSION}")
    differing = [name for name, value in _identity(plan).items() if state.get(name) != value]
    if differing:
        raise UsageError(f"the state is of a loader with another {' and '.join(differing)}; give it the same")
    number, place, rank, world_size = (
        _natural(state, name) for name in ("epoch", "place", "rank", "world_size")
    )
    receipt = _receipt(state, plan.dataset, number)
    is_ours = (rank, world_size) == (plan.rank, plan.world_size)
    return Epoch(plan, number, start=place, receipt=receipt if is_ours else None)


def _identity(plan: EpochPlan) -> dict[str, Any]:
    """What must be the same for an order to be the same; a dataset's root covers its shards."""
    shuffle = plan.shuffle.to_json() if plan.shuffle else None
    return {"dataset": plan.dataset, "shuffle": shuffle, "seed": plan.seed}


def _natural(state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise UsageError(f"not the state of a loader: its {name} is {value!r}")
    return value


def _receipt(state: dict[str, Any], dataset: str, epoch: int) -> Receipt:
    try:
        receipt = Receipt.from_json(state.get("receipt"))  # type: ignore[arg-type]
    except (DataError, UnknownVersion) as error:
        raise UsageError(f"not the state of a loader: {error}") from error
    if (receipt.dataset, receipt.epoch) != (dataset, epoch):
        raise UsageError("not the state of a loader: its receipt is of another epoch or dataset")
    return receipt
