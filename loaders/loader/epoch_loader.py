"""Shared base of Loader and FakeData: epochs, a state, and steps made again."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.images.canaries import warn_of_other_decoder
from shardprep.formats.shards.dataset import RecordSet
from shardprep.loaders.batches.passes import FrameworkHint
from shardprep.loaders.batches.stack import BatchSpec, full_batch_bytes
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.messages import EngineBatch, Items, fill_batch
from shardprep.loaders.loader.ahead import LocalShards
from shardprep.loaders.loader.options import Subset, described
from shardprep.loaders.loader.replay import (
    ObservedTransform,
    Parting,
    Replayed,
    ReplayedRecord,
    RunOrder,
    ShownParts,
    first_parting,
    shown_batch,
)
from shardprep.loaders.loader.run_card import (
    ChosenRecords,
    Resumed,
    RunCard,
    TransformCard,
    decoder_of,
    digest_of,
    kept_transform,
    refuse_another,
)
from shardprep.loaders.loader.run_log import LogEntry
from shardprep.loaders.loader.stats import LoaderStats
from shardprep.loaders.loader.work import DeclaredResults, ShardWork, results_of, without
from shardprep.loaders.order.epoch import Epoch, EpochPlan, EpochSteps, LoadedStep, checked_ranges, resumed
from shardprep.loaders.order.parts import Records
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.transforms.contract import AsColumns, Transform

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
            return next(steps).batch

    @property
    @abstractmethod
    def transform(self) -> Transform | None:
        """The transform that was given; None for what delivers columns as they are."""

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
        with other workers, batch size or world size. After :meth:`set_epoch` it is that epoch's start.
        """
        return (self._next if self._place.is_over else self._place).state()

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


class ReplayableLoader(EpochLoader, ABC):
    """A loader of a dataset's records that can make any step again."""

    dataset: RecordSet
    engine: Engine
    _subset: Subset
    _work: ShardWork
    _shards: LocalShards
    _labels: npt.NDArray[np.int64]
    _columns: tuple[str, ...] | None
    _weights: dict[str, float] | None
    _with_numbers: bool
    _state_card: RunCard | None = None

    def replay(
        self, epoch: int, step: int, *, start: int = 0, passed: Sequence[Sequence[int]] = ()
    ) -> Replayed:
        """Return what this rank gets at a step of an epoch: records, keys, labels, crops and the batch.

        The batch is bit for bit that of an iteration. It is made in this process, of these records alone. The
        loader's place, receipt and iteration stay as they are; a closed loader has its steps, too. They are
        counted from the epoch's beginning, or from the place ``start`` (``"start"`` of a state) where a rest
        of it began, with another batch size or world size than before. Steps that :meth:`skip` left out have
        numbers, too, unless ``passed`` (``"passed"`` of a state) says which they are. Raises IndexError for a
        step that the epoch does not have, and the errors of an iteration over these records.
        """
        ranges = checked_ranges([list(both) for both in passed], sum(self._plan.shard_counts))
        plan = replace(self._plan, passed=ranges)
        steps = EpochSteps(plan, operator.index(epoch), start=plan.within(start))
        places = next(steps.batches([operator.index(step)], deque()))
        items = self._subset.items_at(places, epoch)
        observed, batch = self._made_here(items, step)
        parts, _, _ = self._parts(results_of(self._work.transform, room=0), batch)
        rows = zip(items["number"].tolist(), self._labels[items["label"]].tolist(), strict=True)
        records = (
            ReplayedRecord(number, key, label, observed.get(key, ()), batch.skipped.get(row))
            for row, (number, label) in enumerate(rows)
            for key in (self.key(number),)
        )
        return Replayed(epoch, step, tuple(parts), tuple(records))

    def _class_of(self, number: int) -> str:
        """The name of the class of a record; empty without a label."""
        label = int(self.dataset.index["label"][number])
        return self.dataset.classes[label] if label >= 0 else ""

    def _made_here(self, items: Items, step: int) -> tuple[dict[str, ShownParts], EngineBatch]:
        """Return the batch of these items, and the shown parts of their images, by key."""
        transform = self._work.transform
        is_observed = transform is not None and not isinstance(transform, AsColumns)
        observed = ObservedTransform(transform) if is_observed and transform else None
        work = replace(self._work, transform=observed or transform, one_thread=False)
        layout = replace(self.engine.layout, inputs=0, sparse=False)
        needed = self._shards.held(np.unique(items["shard"]).tolist())
        with needed, work.open(np.zeros(len(work.stages))) as fill:
            batch = fill_batch(fill, step, items, layout=layout, where=_where)
        return observed.shown if observed else {}, batch

    def _parts(self, results: DeclaredResults, batch: EngineBatch) -> tuple[list[Any], Records, Records]:
        """Return the parts without the rows that were skipped, and the places of both."""
        bad = list(batch.skipped)
        numbers: npt.NDArray[np.int64] = np.ascontiguousarray(batch.items["number"])
        labels = self._labels[batch.items["label"]]  # the workers have checked them against the records
        places = self._subset.places_of(batch.items)
        own = without(bad, (labels, numbers) if self._with_numbers else (labels,))
        return [*results.parts(batch, bad), *own], np.delete(places, bad), places[bad]

    def card(self) -> RunCard:
        """Return what decides the batches of this rank's run; ``card().save(path)`` writes it to a file."""
        transform = self.transform
        identity = None
        if transform is not None:
            with suppress(UsageError):  # it cannot be compared
                identity = digest_of(transform)
        return self._card(identity)

    def order_of(self, card: RunCard | None = None) -> RunOrder:
        """Return what this loader's run delivers, for :func:`.first_parting`; ``card`` by default its own."""
        label_of = self._labels[self.dataset.index["label"]]
        passed = {one.number: one.plan.passed for one in (self._current, self._next) if one.plan.passed}
        return RunOrder(card or self.card(), self._plan, self._subset.numbers_at, label_of, passed)

    @property
    def transform(self) -> Transform | None:
        """The transform that was given; None for what delivers columns as they are."""
        transform = self._work.transform
        return None if isinstance(transform, AsColumns) else transform

    def _card(self, identity: str | None) -> RunCard:
        plan, chosen, transform = self._plan, self._subset.chosen, self.transform
        omission, omitted = self._subset.omission, self._subset.omitted
        return RunCard.of(
            plan,
            dataset=self.dataset.root,
            split=self.dataset.split,
            records=None if chosen is None else ChosenRecords.of(chosen, digest_of(chosen)),
            labels=self.dataset.label_space,
            columns=self._columns,
            weights=self._weights,
            on_bad_record="skip" if self._work.skip_bad else "raise",
            with_numbers=self._with_numbers,
            transform=None if transform is None else TransformCard.of(transform, identity),
            without=None if omitted is None else ChosenRecords.of(omitted, digest_of(omitted)),
            gaps=None if omission is None else "close" if omission.closes else "keep",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place as plain JSON values; only the skipped records make it larger.

        The last batch that was yielded counts as delivered; :meth:`load_state_dict` continues after it, also
        with other workers, batch size or world size. After :meth:`set_epoch` it is that epoch's start. The
        run's :meth:`card` is in it for replays, without the identity of the transform, which holds for one
        version of each library, and without the numbers of chosen records; loading does not need it.
        """
        if self._state_card is None:
            self._state_card = self._card(identity=None).without_numbers()
        kept = {"card": self._state_card.to_json(), "transform": self._kept_transform}
        return super().state_dict() | kept

    @cached_property
    def _kept_transform(self) -> dict[str, Any] | None:  # type: ignore[override]
        return None if self.transform is None else kept_transform(self.transform)


def _where(row: int, step: int, item: Any) -> str:
    return f"at row {row} of step {step}: {printable(described(item))}"
