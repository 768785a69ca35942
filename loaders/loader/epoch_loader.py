"""Shared base of Loader and FakeData: epochs, a state and a receipt."""

from __future__ import annotations

import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.images.canaries import warn_of_other_decoder
from shardprep.loaders.batches.passes import FrameworkHint
from shardprep.loaders.batches.stack import BatchSpec, full_batch_bytes
from shardprep.loaders.loader.replay import (
    Parting,
    Replayed,
    RunOrder,
    first_parting,
    shown_batch,
)
from shardprep.loaders.loader.run_card import (
    Resumed,
    RunCard,
    decoder_of,
    refuse_another,
)
from shardprep.loaders.loader.run_log import LogEntry
from shardprep.loaders.loader.stats import LoaderStats
from shardprep.loaders.order.epoch import Epoch, EpochPlan, LoadedStep, resumed
from shardprep.loaders.order.parts import Records
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.transforms.contract import Transform

if TYPE_CHECKING:
    from shardprep.formats.images.pictures import Gallery


class EpochLoader(FrameworkHint, ABC):
    """Iterable over batches, one epoch per iteration, with a state to go on from and a receipt."""

    batches_never_change = True
    _kept_transform: dict[str, Any] | None = None  # the transform in a state

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        # The epochs of the next iteration, of the receipt, and of the state.
        self._next = self._current = self._place = Epoch(plan, 0)
        self._skipped: dict[str, str] = {}

    def __len__(self) -> int:
        """Number of batches of the next iteration: those of an epoch, or the rest of a resumed one."""
        self._refuse_sampler()
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
        """Return the next epoch's first batch, which counts as nothing: :meth:`steps` makes it."""
        with closing(self.steps(self.epoch, [0])) as steps:  # type: ignore[type-var]
            batch: tuple[Any, ...] = next(steps).batch
        return batch

    @property
    def transform(self) -> Transform | None:
        """The transform that was given; None for what delivers columns as they are."""
        return None

    @abstractmethod
    def replay(self, epoch: int, step: int, *, start: int = 0) -> Replayed:
        """Return what this rank gets at a step of an epoch: records, keys, labels, crops and the batch."""

    def show_batch(self, epoch: int | None = None, step: int = 0, *, most: int = 16) -> Gallery:
        """Return the images of a step as a training gets them: pictures in a notebook, a list in a terminal.

        ``epoch`` is by default the next one. At most ``most`` images are shown, up to 100, each with the
        number, key and class of its record. The batch is made by :meth:`replay`, so the loader's place stays,
        and so do its errors; UsageError for a batch without images. Normalised pixels are shown as they were
        before.
        """
        made = self.replay(self.epoch if epoch is None else epoch, step)
        return shown_batch(made, self.transform, self._class_of, title=repr(self), most=most)

    @abstractmethod
    def _class_of(self, number: int) -> str:
        """The name of the class of a record; empty without a label."""

    @abstractmethod
    def card(self) -> RunCard:
        """Return what decides the batches of this rank's run; ``card().save(path)`` writes it to a file."""

    @abstractmethod
    def order_of(self, card: RunCard | None = None) -> RunOrder:
        """Return what this loader's run delivers, for :func:`.first_parting`; ``card`` by default its own."""

    def parting(self, other: EpochLoader, epochs: Iterable[int] = (0,)) -> Parting | None:
        """Return the first step and record at which another loader's run differs, and why; None for none.

        ``epochs`` are compared, by the order, the labels and the settings: no image is read.
        """
        return first_parting(self.order_of(), other.order_of(), epochs)

    @property
    def most_held(self) -> int:
        """Number of batches that may be held at a time before further ones are copied."""
        return sys.maxsize

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

    def skip(self, steps: Iterable[int]) -> None:
        """Leave steps out of the next epoch, or of the rest of a resumed one, as after a spike of the loss.

        ``steps`` are counted from the epoch's beginning, with this loader's batch size and world size; all
        other steps are what they were. Give every rank the same steps. The state keeps them, for any batch
        size and world size, and the receipt counts their records as ``omitted``. An iteration that has begun
        does not change: load its state first. Make a framework's dataset of the loader after it, since that
        may count the steps.

        Raises UsageError for steps that the epoch does not have, or that lie before the place from which it
        continues; and where that place is within a step, because the batch size has changed since.
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
        """Return the loader's place as plain JSON values; only the skipped records make it larger.

        The last batch that was yielded counts as delivered; :meth:`load_state_dict` continues after it, also
        with other workers, batch size or world size. After :meth:`set_epoch` it is that epoch's start. The
        :meth:`card` of a Loader is in it for replays, without the identity of the transform, which holds for
        one version of each library, and without the numbers of chosen records; loading does not need it.
        """
        return (self._next if self._place.is_over else self._place).state() | self._run_of_state()

    def _run_of_state(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], *, transform: Resumed = "same") -> None:
        """Make the next iteration continue where the state was taken. On a UsageError nothing is changed.

        Each rank loads its own state; with another world size, all ranks load the state of one. The dataset,
        the order and the transform must be those of the state; ``transform="changed"`` takes any transform,
        which the rest of the epoch is then made with. Warns with DecoderDiffers where images were decoded to
        other pixels before.
        """
        found = resumed(self._plan, state)
        there = state.get("transform", self._kept_transform)  # older states have none
        refuse_another([there], [self._kept_transform], transform)
        if self._kept_transform is not None and (decoder := decoder_of(state)) is not None:
            warn_of_other_decoder(decoder)
        self._next = self._current = self._place = found

    def receipt(self) -> Receipt:
        """Return what this rank has delivered of the current epoch, or of the last one.

        Of a subset, the receipt counts places in :attr:`records` instead of record numbers.
        """
        return self._current.receipt

    def log_epoch(self, path: str | os.PathLike[str]) -> None:
        """Append what this rank got of the current epoch to a log, for ``prep prove``; call it at each end.

        A line of JSON, flushed. Each rank may have a file, or all share one of a local disk. A log of an
        epoch that is resumed later is replaced by the next one of the same rank. Raises UsageError for a log
        that is signed, OSError.
        """
        LogEntry.of(self.card(), self._current).append_to(path)

    @property
    def skipped(self) -> dict[str, str]:
        """The bad records that were skipped so far: key to reason."""
        return dict(self._skipped)

    @abstractmethod
    def stats(self) -> LoaderStats:
        """Return the counts and times since the loader was made, to be printed. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """End the workers and release memory and files; delivered batches stay valid. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
