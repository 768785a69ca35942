"""What a Loader and whatever takes its place have in common: epochs, a state and a receipt."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, Self

import numpy as np

from shardprep.loaders.batching.keras_hint import KerasHint
from shardprep.loaders.batching.spec import BatchSpec, full_batch_bytes
from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.order.epoch import Epoch, EpochPlan, LoadedStep, resumed
from shardprep.loaders.order.receipt import Receipt

from .stats import LoaderStats


class EpochLoader(KerasHint, ABC):
    """Iterable over batches, one epoch per iteration, with a state to go on from and a receipt."""

    batches_never_change = True

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        # The epochs of the next iteration, of the receipt, and of the state.
        self._next = self._current = self._place = Epoch(plan, 0)

    def __len__(self) -> int:
        """Number of batches of the next iteration: those of an epoch, or the rest of a resumed one."""
        return len(self._next)

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Begin the next epoch; one that was left early is not continued."""

    @abstractmethod
    def steps(self, epoch: int, steps: Iterable[int]) -> Iterator[LoadedStep]:
        """Yield the batches of these steps of an epoch, counted from its beginning, in the order given."""

    def _begin(self) -> Epoch:
        epoch = self._current = self._place = self._next
        self._next = Epoch(self._plan, epoch.number + 1)
        return epoch

    @property
    def records(self) -> Records:
        """The record numbers that an epoch delivers over all ranks, in stored order: int64."""
        return np.arange(sum(self._plan.shard_counts))

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch."""
        return len(self._plan.split(0))

    @property
    @abstractmethod
    def batch_specs(self) -> tuple[BatchSpec, ...] | None:
        """The parts of a batch; None for a transform that declares no outputs."""

    @property
    def batch_bytes(self) -> int | None:
        """Bytes of the arrays of a full batch; None for a transform that declares no outputs.

        Raises UsageError where they have no fixed size.
        """
        specs = self.batch_specs
        return None if specs is None else full_batch_bytes(specs, self._plan.batch_size)

    def first_batch(self) -> tuple[Any, ...]:
        """Return the next epoch's first batch, of which nothing is counted: :meth:`steps` makes it."""
        with closing(self.steps(self.epoch, [0])) as steps:  # type: ignore[type-var]
            return next(steps).batch

    @property
    @abstractmethod
    def most_held(self) -> int:
        """Number of batches that may be held at a time before further ones are copied."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, str]:
        """The values that determine the batches, by name: equal identities mean equal batches."""

    @abstractmethod
    def key(self, number: int) -> str:
        """Return the key of the record with this number."""

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next iteration delivers."""
        return self._next.number

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration deliver this epoch, from its beginning."""
        self._next = self._place = Epoch(self._plan, operator.index(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place as plain JSON values; only the skipped records make it larger.

        The last batch that was yielded counts as delivered; :meth:`load_state_dict` continues after it, also
        with other workers, batch size or world size. After :meth:`set_epoch` it is that epoch's start.
        """
        return (self._next if self._place.is_over else self._place).state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where the state was taken. On a UsageError nothing is changed.

        Each rank loads its own state; with another world size, all ranks load the state of one.
        """
        self._next = self._current = self._place = resumed(self._plan, state)

    def receipt(self) -> Receipt:
        """Return what this rank has delivered of the current epoch, or of the last one.

        Of a subset, the receipt counts places in :attr:`records` instead of record numbers.
        """
        return self._current.receipt

    @property
    @abstractmethod
    def skipped(self) -> dict[str, str]:
        """The bad records that were skipped so far: key to reason."""

    @abstractmethod
    def stats(self) -> LoaderStats:
        """Return the counts and times since the loader was made, to be printed. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """End the work and release memory and files; delivered batches stay valid. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
