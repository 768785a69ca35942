"""The steps of a loader made again, and the card of its run."""

from __future__ import annotations

import operator
from abc import ABC
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.dataset.record_set import RecordSet
from shardprep.formats.errors import UsageError
from shardprep.formats.printable import printable
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.protocol.batch import EngineBatch, fill_batch
from shardprep.loaders.engine.protocol.task import Items
from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.order.epoch import EpochSteps
from shardprep.loaders.transforms.columns import AsColumns
from shardprep.loaders.transforms.contract import Transform

from .epoch_loader import EpochLoader
from .options import described
from .remote_shards.local_shards import LocalShards
from .replaying.chosen_records import ChosenRecords
from .replaying.identity import digest_of
from .replaying.observed import ObservedTransform
from .replaying.parting import Parting, RunOrder, first_parting
from .replaying.replayed import Replayed, ReplayedRecord
from .replaying.run_card import RunCard, installed_versions
from .replaying.transform_card import TransformCard
from .results import DeclaredResults, results_of, without
from .shard_task import ShardWork
from .subset import Subset

if TYPE_CHECKING:
    from shardprep.formats.images.gallery import Gallery


class ReplayableLoader(EpochLoader, ABC):
    """A loader of a dataset's records, of which any step can be made again."""

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

    def replay(self, epoch: int, step: int, *, start: int = 0) -> Replayed:
        """Return what this rank gets at a step of an epoch: records, keys, labels, crops and the batch.

        The batch is bit for bit that of an iteration. It is made in this process, of these records alone. The
        loader's place, receipt and iteration stay as they are; a closed loader has its steps, too. They are
        counted from the epoch's beginning, or from the place ``start`` (``"start"`` of a state) where a rest
        of it began, with another batch size or world size than before. Raises IndexError for a step that the
        epoch does not have, and what an iteration raises for these records.
        """
        steps = EpochSteps(self._plan, operator.index(epoch), start=start)
        places = next(steps.batches([operator.index(step)], deque()))
        items = self._subset.items_at(places, epoch)
        observed, batch = self._made_here(items, step)
        parts, _, _ = self._parts(results_of(self._work.transform, room=0), batch)
        rows = zip(items["number"].tolist(), self._labels[items["label"]].tolist(), strict=True)
        records = (
            ReplayedRecord(number, key, label, observed.get(key), batch.skipped.get(row))
            for row, (number, label) in enumerate(rows)
            for key in (self.key(number),)
        )
        return Replayed(epoch, step, tuple(parts), tuple(records))

    def show_batch(self, epoch: int | None = None, step: int = 0, *, most: int = 16) -> Gallery:
        """Return the images of a step as a training gets them: pictures in a notebook, a list in a terminal.

        ``epoch`` is by default the next one. At most ``most`` images are shown, up to 100, each with the
        number, key and class of its record. The batch is made by :meth:`replay`, so the loader's place stays,
        and so do its errors; UsageError for a batch without images. Normalised pixels are shown as they were
        before.
        """
        from .replaying.shown_batch import shown_batch  # start-up time

        made = self.replay(self.epoch if epoch is None else epoch, step)
        return shown_batch(made, self.transform, self._class_of, title=repr(self), most=most)

    def _class_of(self, number: int) -> str:
        """The name of the class of a record; empty without a label."""
        label = int(self.dataset.index["label"][number])
        return self.dataset.classes[label] if label >= 0 else ""

    def _made_here(self, items: Items, step: int) -> tuple[dict[str, Any], EngineBatch]:
        """Return the batch of these items, and what is shown of their images, by key."""
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

    def parting(self, other: ReplayableLoader, epochs: Iterable[int] = (0,)) -> Parting | None:
        """Return the first step and record at which another loader's run differs, and why; None for none.

        ``epochs`` are compared, by the order, the labels and the settings: no image is read.
        """
        return first_parting(self.order_of(), other.order_of(), epochs)

    def order_of(self, card: RunCard | None = None) -> RunOrder:
        """Return what this loader's run delivers, for :func:`.first_parting`; ``card`` by default its own."""
        label_of = self._labels[self.dataset.index["label"]]
        return RunOrder(card or self.card(), self._plan, self._subset.numbers_at, label_of)

    @property
    def transform(self) -> Transform | None:
        """The transform that was given; None for what delivers columns as they are."""
        transform = self._work.transform
        return None if isinstance(transform, AsColumns) else transform

    def _card(self, identity: str | None) -> RunCard:
        plan, chosen, transform = self._plan, self._subset.chosen, self.transform
        return RunCard(
            dataset=self.dataset.root,
            split=self.dataset.split,
            records=None if chosen is None else ChosenRecords.of(chosen, digest_of(chosen)),
            labels=self.dataset.label_space,
            columns=self._columns,
            weights=self._weights,
            shuffle=plan.shuffle,
            seed=plan.seed,
            batch_size=plan.batch_size,
            rank=plan.rank,
            world_size=plan.world_size,
            drop_last=plan.drop_last,
            on_bad_record="skip" if self._work.skip_bad else "raise",
            with_numbers=self._with_numbers,
            transform=None if transform is None else TransformCard.of(transform, identity),
            versions=installed_versions(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place as plain JSON values; only the skipped records make it larger.

        The last batch that was yielded counts as delivered; :meth:`load_state_dict` continues after it, also
        with other workers, batch size or world size. After :meth:`set_epoch` it is that epoch's start. The
        run's :meth:`card` is in it for replays, without the identity of the transform, which may take long to
        find, and without the numbers of chosen records; loading does not need it.
        """
        if self._state_card is None:
            self._state_card = self._card(identity=None).without_numbers()
        return super().state_dict() | {"card": self._state_card.to_json()}


def _where(row: int, step: int, item: Any) -> str:
    return f"at row {row} of step {step}: {printable(described(item))}"
