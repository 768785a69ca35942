"""The base of Loader and FakeData: epochs, a state and a receipt."""

from __future__ import annotations

import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.images.canaries import warn_of_other_decoder
from shardprep.formats.runtime.owned import Closable
from shardprep.loaders.batches.passes import FrameworkHint
from shardprep.loaders.batches.stack import BatchSpec, full_batch_bytes
from shardprep.loaders.loader.replay import Parting, Replayed, RunOrder, first_parting, shown_batch
from shardprep.loaders.loader.run_card import Resumed, RunCard, decoder_of, refuse_another
from shardprep.loaders.loader.run_log import LogEntry
from shardprep.loaders.loader.stats import LoaderStats
from shardprep.loaders.order.epoch import Epoch, EpochPlan, LoadedStep, resumed
from shardprep.loaders.order.parts import Records
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.transforms.contract import Transform

if TYPE_CHECKING:
    from shardprep.formats.images.pictures import Gallery


class EpochLoader(FrameworkHint, Closable, ABC):
    """Iterable over batches, one epoch per iteration, with a state to resume from and a receipt."""

    batches_never_change = True
    _kept_transform: dict[str, Any] | None = None  # as states describe it
    _waiting: Epoch | None = None  # the epoch of an iterator that was not asked for a batch yet

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        # the epochs of the next iteration, of the receipt, and of the state
        self._next = self._current = self._place = Epoch(plan, 0)
        self._skipped: dict[str, str] = {}

    def __len__(self) -> int:
        """Number of batches of the next iteration: of a whole epoch, or of the rest of a resumed one."""
        self._refuse_sampler()
        return self.batches_per_epoch if self._next is self._waiting else len(self._next)

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Iterate the next epoch, which begins with its first batch; an abandoned one is not continued."""

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

        Raises UsageError if they have no fixed size.
        """
        specs = self.batch_specs
        return None if specs is None else full_batch_bytes(specs, self._plan.batch_size)

    def first_batch(self) -> tuple[Any, ...]:
        """Return the next epoch's first batch, made by :meth:`steps`, without counting it as delivered."""
        with closing(self.steps(self.epoch, [0])) as steps:  # type: ignore[type-var]
            batch: tuple[Any, ...] = next(steps).batch
        return batch

    @property
    def transform(self) -> Transform | None:
        """The transform that was given; None if columns are delivered as they are."""
        return None

    @abstractmethod
    def replay(self, epoch: int, step: int, *, start: int = 0) -> Replayed:
        """Reproduce a step of an epoch on this rank: its records, keys, labels, crops and batch."""

    def show_batch(self, epoch: int | None = None, step: int = 0, *, most: int = 16) -> Gallery:
        """Return the images of a step as training gets them: pictures in a notebook, a list in a terminal.

        ``epoch`` defaults to the next one. At most ``most`` images are shown, up to 100, each with the
        number, key and class of its record; normalised pixels are shown as they were before. :meth:`replay`
        makes the batch, so the loader's place does not change. Raises the errors of a replay, and UsageError
        for a batch without images.
        """
        made = self.replay(self.epoch if epoch is None else epoch, step)
        return shown_batch(made, self.transform, self._class_of, title=repr(self), most=most)

    @abstractmethod
    def _class_of(self, number: int) -> str:
        """Return the name of a record's class; empty without a label."""

    @abstractmethod
    def card(self) -> RunCard:
        """Return all that determines the batches of this rank's run; ``card().save(path)`` writes a file."""

    @abstractmethod
    def order_of(self, card: RunCard | None = None) -> RunOrder:
        """Describe this loader's run for :func:`.first_parting`; ``card`` defaults to its own."""

    def parting(self, other: EpochLoader, epochs: Iterable[int] = (0,)) -> Parting | None:
        """Return the first step and record at which another loader's run differs, and why; None if none.

        Compares the settings, and the order and labels of these ``epochs``; reads no image.
        """
        return first_parting(self.order_of(), other.order_of(), epochs)

    @property
    def most_held(self) -> int:
        """Number of batches that may be held at once before further ones are copied."""
        return sys.maxsize

    @property
    @abstractmethod
    def identity(self) -> dict[str, str]:
        """The values that determine the batches, by name; equal identities mean equal batches."""

    @abstractmethod
    def key(self, number: int) -> str:
        """Return the key of the record with this number."""

    @property
    def epoch(self) -> int:
        """The number of the next iteration's epoch."""
        return self._next.number

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch."""
        self._next = self._place = Epoch(self._plan, operator.index(epoch))

    def skip(self, steps: Iterable[int]) -> None:
        """Skip steps of the next epoch, or of the rest of a resumed one, as after a loss spike.

        ``steps`` are counted from the epoch's beginning, with this loader's batch size and world size; all
        other steps stay the same. Give every rank the same steps. The state keeps them, for any batch size
        and world size, and the receipt counts their records as ``omitted``. An iteration that has begun does
        not change: load its state first. Make a framework's dataset from the loader afterwards, since it may
        count the steps.

        Raises UsageError for steps that do not exist or lie before the place from which the epoch continues,
        and if that place is within a step, because the batch size has changed since.
        """
        epoch = self._next
        try:
            numbers = [operator.index(step) for step in steps]
        except TypeError as error:
            raise UsageError(f"steps must be a list or a range of step numbers, not {steps!r}") from error
        plan = epoch.plan.passing(numbers, start=epoch.start)
        changed = Epoch(plan, epoch.number, start=epoch.start, receipt=epoch.receipt, origin=epoch.origin)
        self._next, self._current, self._place = (
            changed if each is epoch else each for each in (self._next, self._current, self._place)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place as plain JSON values; its size grows only with the skipped records.

        The last batch yielded counts as delivered. :meth:`load_state_dict` continues after it, even with
        other workers, batch size or world size. After :meth:`set_epoch` the place is that epoch's start. For
        replays, a Loader's state includes its :meth:`card`, without the numbers of chosen records and without
        the identity of the transform, which is valid for one version of each library. Loading does not need
        it.
        """
        return (self._next if self._place.is_over else self._place).state() | self._run_of_state()

    def _run_of_state(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], *, transform: Resumed = "same") -> None:
        """Continue the next iteration where the state was taken. On a UsageError nothing changes.

        Each rank loads its own state; with another world size, all ranks load the state of one. The dataset,
        the order and the transform must be those of the state; ``transform="changed"`` accepts any transform
        for the rest of the epoch. Warns with DecoderDiffers if images were decoded to other pixels before.
        """
        found = resumed(self._plan, state)
        there = state.get("transform", self._kept_transform)  # older states have none
        refuse_another([there], [self._kept_transform], transform)
        if self._kept_transform is not None and (decoder := decoder_of(state)) is not None:
            warn_of_other_decoder(decoder)
        self._next = self._current = self._place = found

    def receipt(self) -> Receipt:
        """Return the receipt for this rank's deliveries of the current epoch, or of the last one.

        For a subset, the receipt counts places in :attr:`records` instead of record numbers.
        """
        return self._current.receipt

    def log_epoch(self, path: str | os.PathLike[str]) -> None:
        """Append this rank's part of the current epoch to a log for ``prep prove``; call it after each epoch.

        Writes and flushes a line of JSON. Each rank may have its own file, or all share one on a local disk.
        If the epoch is resumed later, the rank's next line replaces this one. Raises UsageError for a signed
        log, OSError.
        """
        epoch = self._current
        places = epoch.start, epoch.place, epoch.origin
        LogEntry(self.card(), epoch.receipt, *places, epoch.plan.passed).append_to(path)

    @property
    def skipped(self) -> dict[str, str]:
        """The bad records skipped so far: key to reason."""
        return dict(self._skipped)

    @abstractmethod
    def stats(self) -> LoaderStats:
        """Return printable counts and times since the loader was made. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and release memory and files; delivered batches stay valid. Idempotent."""
