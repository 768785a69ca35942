"""The loader: batches of a dataset's records, in order, exactly once."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain, count, islice, tee
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.images.decode import (
    check_decoder,
    cv2,
    encode_png,
    warn_of_decoder,
    warn_of_other_decoder,
)
from shardprep.formats.images.pictures import MAX_SHOWN, Gallery, ShownImage
from shardprep.formats.runtime.owners import Closable, Owner
from shardprep.formats.runtime.processes import MAX_WORKERS, usable_cpus
from shardprep.formats.runtime.progress import check_flags, check_int, count_of
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.storage.cache import CachedDataset, FileSource
from shardprep.formats.storage.open import Collection, open_records
from shardprep.loaders.batches.passes import refuse_sampler
from shardprep.loaders.batches.stack import BatchSpec, loader_specs
from shardprep.loaders.engine.dispatcher import Plan
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.messages import EngineBatch, fill_batch
from shardprep.loaders.loader.ahead import ShardFeed, ShardFiles, StorageCounts, reading_ahead
from shardprep.loaders.loader.digest import digest_of
from shardprep.loaders.loader.replay import (
    Parting,
    Replayed,
    ReplayedRecord,
    RunOrder,
    ShownParts,
    first_parting,
    pictures_of,
    shown_parts,
)
from shardprep.loaders.loader.run_card import (
    PLAN_SETTINGS,
    ChosenRecords,
    RunCard,
    TransformCard,
    TransformRule,
    check_transforms,
    describe_transform,
    transform_digest,
    transform_name,
)
from shardprep.loaders.loader.run_log import LogEntry
from shardprep.loaders.loader.stats import LoaderStats
from shardprep.loaders.loader.work import (
    ROOM_FOR_ROWS,
    Classes,
    Results,
    ShardWork,
    Subset,
    WantedColumns,
    blocks_to_read,
    delete_rows,
    describe_item,
    locate_item,
    location_of,
    make_epoch_plan,
    make_layout,
    mean_bytes,
)
from shardprep.loaders.order.epoch import Epoch, LoadedStep, Shuffle, parse_ranges, resume_epoch
from shardprep.loaders.order.parts import Records
from shardprep.loaders.order.quality import ShuffleQuality, shuffle_quality
from shardprep.loaders.order.ranks import refuse_accelerate, refuse_changed_rank
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.transforms.contract import AsColumns, Transform, check_choice, outputs_of

DEFAULT_SLOTS = 9  # two queued, one staged, two in the step, one in transit to each, and RESERVED_SLOTS
READ_AHEAD_BYTES = 64 << 20

Batches = Generator[EngineBatch, None, None]


class Loader(Owner, Closable):
    """Iterable over a dataset's batches, one epoch per iteration: ``for images, labels in loader``.

    A batch of B = ``batch_size`` records is a tuple: one array [B, …] per output of ``transform``, labels
    int64 [B], and, with ``with_numbers``, record numbers int64 [B]. Without a transform the images are a list
    of memoryviews of the encoded files; a dataset with columns has a dict in their place, with arrays of
    numbers and labels (int64), and lists of text, JSON, bytes and encoded images (bytes). Arrays of variable
    size are stacked if their shapes agree.

    Batches never change, and are bit for bit the same for any number of workers. Over all ranks, each record
    comes once per epoch, as :meth:`receipt` proves; ``drop_last`` leaves out those after the last full batch
    of all ranks.

    Cannot be copied or pickled. Use one thread and one iterator at a time: a new iterator ends the previous
    one. Close or drop the loader after use.

    Args:
        path: Folder of a dataset or of a collection, or the URL of a dataset, as :func:`.fetch` takes it.
        batch_size: Records per batch of one rank.
        transform: Makes the arrays of a record; see :class:`.Transform` for transforms without declared
            outputs. None delivers the encoded images.
        shuffle: :class:`.LocalShuffle`, :class:`.GlobalShuffle`, or None for stored order.
        seed: Seed of the order and of the transform's random values, 0 to 2**64 - 1.
        workers: Number of processes; "auto" is one per usable CPU, 0 works in the calling thread. Processes
            make the next epoch's first batches before it begins, unless the dataset is at a URL.
        rank: Rank of this process among ``world_size``; None takes it from an initialised framework or the
            launcher.
        world_size: Number of ranks that share an epoch; None as for ``rank``.
        drop_last: Whether to leave out records after the last full batch of all ranks.
        labels: Label space: "sorted_wnid0", "ilsvrc2012_id" or "sorted_wnid1_bg", as for
            :func:`.open_dataset`.
        records: A subset, as a boolean mask over the dataset, record numbers, or keys. Order, steps, receipts
            and states then count the subset alone; stored order and labels remain the dataset's.
        classes: A subset, as class names or labels. With ``records``, the intersection.
        without: Records to omit: a boolean mask over the dataset, record numbers, or keys. All others keep
            their order and random values; the receipt counts the omitted ones as ``omitted``.
        gaps: "close" moves later records up, so that batches stay full; "keep" only drops the omitted records
            from their batches, which are otherwise bit for bit those of a run with them.
        weights: A number for each part of a collection, by name. They divide an epoch exactly among the
            parts: a part may repeat records, with new random values, or continue in the next epoch where it
            stopped. Receipts and states count places; nothing is read ahead.
        columns: Names of columns, and "image", in the order of a batch; others are not read, even for a
            transform. None reads all; a transform then gets "boxes" and "box_labels", too, but a batch has
            them only if they are named.
        on_bad_record: "raise", or "skip" to leave out records that are damaged, do not decode, or crash three
            workers (with SIGSEGV, for example; with ``workers=0`` that ends this process).
        with_numbers: Whether to append the record numbers to each batch.
        slots: Number of batches that fit into the shared memory.
        deadline: Seconds that a record may take before its worker is killed; None is unlimited. A worker may
            take as long to start, but at least 30 s, and 120 s without a deadline.
        read_ahead: Bytes to read ahead, in storage order; 0 for none.
        cache: For a URL: a folder on a local disk, shared by all processes of this machine. Shards are
            downloaded ahead of their use; the one whose next use is furthest away, within this epoch and the
            next, is evicted first.
        cache_limit: Largest size of the cache, in bytes or as "200GiB"; None is the free space of the disk.

    Raises:
        UsageError: An argument is invalid, or an epoch has no batch.
        CacheTooSmall: The cache cannot hold the shards needed at once; the error states the least limit.
        ShardprepError: A record is damaged or does not decode; see :mod:`shardprep.formats.errors`. Errors of
            a transform are raised unchanged, with the key.
    """

    batches_never_change = True
    dataset: Dataset | Collection
    _state_card: RunCard | None = None
    _latest_batches: Batches | None = None  # of the latest run
    _early_epoch: tuple[Epoch, Batches] | None = None  # an epoch whose first batches are being made
    _unstarted_epoch: Epoch | None = None  # the epoch of an iterator that was not asked for a batch yet
    copy_advice = (
        "pass the path and the options, and make a Loader where it is needed; for PyTorch, write "
        "DataLoader(to_torch(loader), batch_size=None) without num_workers"
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int = 256,
        transform: Transform | None = None,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        workers: int | Literal["auto"] = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
        labels: str = "sorted_wnid0",
        records: npt.ArrayLike | None = None,
        classes: Classes | None = None,
        without: npt.ArrayLike | None = None,
        gaps: Literal["close", "keep"] = "close",
        weights: Mapping[str, float] | None = None,
        columns: Sequence[str] | None = None,
        on_bad_record: Literal["raise", "skip"] = "raise",
        with_numbers: bool = False,
        slots: int = DEFAULT_SLOTS,
        deadline: float | None = None,
        read_ahead: int = READ_AHEAD_BYTES,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
    ) -> None:
        check_choice("on_bad_record", on_bad_record, ("raise", "skip"))
        check_flags(drop_last=drop_last, with_numbers=with_numbers)
        count = usable_cpus() if workers == "auto" else workers
        self._workers = check_int(count, "workers, if not 'auto',", least=0, most=MAX_WORKERS)
        self.dataset = open_records(location_of(path), labels=labels, cache=cache, cache_limit=cache_limit)
        with ExitStack() as undo:
            undo.callback(self.dataset.close)
            self._subset = Subset(self.dataset, records, classes, weights, without=without, gaps=gaps)
            plan = make_epoch_plan(
                self._subset,
                shuffle=shuffle,
                seed=seed,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                drop_last=bool(drop_last),
            )
            self._plan = plan
            # the epochs of the next iteration, of the receipt, and of the state
            self._next_epoch = self._current_epoch = self._state_epoch = Epoch(plan, 0)
            self._skipped: dict[str, str] = {}
            selection = WantedColumns.of(self.dataset, columns)
            if transform is None and selection.are_chosen:
                transform = selection.as_columns
            self._rank_is_given = rank is not None
            self._columns = None if columns is None else selection.names
            self._weights = None if weights is None else {name: float(weights[name]) for name in weights}
            self._labels = self.dataset.space.mapping(labels)
            if transform is not None and selection.with_image:
                warn_of_decoder()
            self._with_numbers = bool(with_numbers)
            files = selection.files_of(self.dataset)
            mean = mean_bytes(files) + (self._subset.mean_image_bytes if selection.with_image else 0)
            self._mean_bytes = mean
            rows = min(plan.batch_size, max(1, sum(plan.shard_counts)))
            layout = make_layout(transform, rows=rows, mean_bytes=mean, workers=self._workers)
            self._results = Results(transform, room=layout.inputs if self._workers else ROOM_FOR_ROWS)
            self._steps_epoch: Epoch | None = None  # of steps()
            self._work = ShardWork(
                parts=files,
                key_bytes=self.dataset.index.dtype["key"].itemsize,
                transform=transform,
                label_map=tuple(self._labels.tolist()),
                seed=plan.seed,
                skip_bad=on_bad_record == "skip",
                with_image=selection.with_image,
                files=FileSource.of(self.dataset),
            )
            self._read_ahead = check_int(read_ahead, "read_ahead, in bytes,", least=0)
            self._shards: ShardFeed | None = None  # of a dataset at a URL
            if isinstance(self.dataset, CachedDataset):
                shard_files = ShardFiles(files, with_image=selection.with_image)
                self._shards = ShardFeed(self.dataset, shard_files, plan)
                undo.callback(self._shards.close)
            own = self.transform
            # for states and for cards, before this process calls or changes the transform
            self._transform_state = None if own is None else describe_transform(own)
            self._transform_digest = None if own is None else transform_digest(own)
            # an epoch that never comes must not download shards, or call a transform in this process
            self._works_ahead = self._workers > 0 and not self._shards
            self.engine = Engine(
                self._work,
                layout,
                workers=self._workers,
                slots=slots,
                deadline=deadline,
                describe=describe_item,
                locate=locate_item,
                owner="Loader",
                skip_crashes=self._work.skip_bad,
            )
            undo.pop_all()

    def __len__(self) -> int:
        """Number of batches of the next iteration: of a whole epoch, or of the rest of a resumed one."""
        refuse_sampler(self)
        return self.batches_per_epoch if self._next_epoch is self._unstarted_epoch else len(self._next_epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Iterate the next epoch, which begins with its first batch; an abandoned one is not continued."""
        if not self._rank_is_given:
            refuse_changed_rank(self._plan.rank, self._plan.world_size)
        refuse_accelerate(self._plan.world_size)
        self._unstarted_epoch = self._next_epoch
        return self._run()

    def _run(self) -> Iterator[tuple[Any, ...]]:
        self.engine.refuse_closed()  # else the place in this epoch would be lost
        epoch = self._current_epoch = self._state_epoch = self._next_epoch
        self._next_epoch = Epoch(self._plan, epoch.number + 1)
        with ExitStack() as undo:
            batches = undo.enter_context(closing(self._batches_from(epoch)))
            # a loop variable would hold a batch
            yield from map(partial(self._deliver, epoch), islice(batches, len(epoch)))
            if self._works_ahead and self._latest_batches is batches:  # no steps() and no close() in between
                undo.pop_all()
                self.engine.pause()
                self._early_epoch = Epoch(self._plan, epoch.number + 1), batches
        epoch.end()

    def _batches_from(self, epoch: Epoch) -> Batches:
        """Return the batches of an epoch and, where the loader works ahead, of all later ones.

        The workers then make the first batches of the next epoch before it begins.
        """
        if self._early_epoch:
            expected, batches = self._early_epoch
            if epoch.plan is expected.plan and (epoch.number, epoch.start) == (expected.number, 0):
                self._early_epoch = None
                return batches
        plan, works_ahead = self._plan, self._works_ahead and self.batches_per_epoch
        later = (Epoch(plan, number) for number in count(epoch.number + 1)) if works_ahead else ()
        return self._batches((each, range(len(each))) for each in chain([epoch], later))

    def _close_early_epoch(self) -> None:
        if self._early_epoch:
            (_, batches), self._early_epoch = self._early_epoch, None
            batches.close()

    def _batches(self, epoch_steps: Iterable[tuple[Epoch, Iterable[int]]]) -> Batches:
        """Return the batches of these steps of some epochs, made in this order.

        They do not refer to this loader, which may refer to them. Raises UsageError for a closed loader.
        """
        self.engine.refuse_closed()
        self._close_early_epoch()
        engine, shards, subset, plan = self.engine, self._shards, self._subset, self._plan
        results, work, budget = self._results, self._work, self._read_ahead
        blocks = blocks_to_read(self.dataset, work.parts, with_image=work.with_image)
        read_ahead = partial(reading_ahead, self.dataset.path, blocks, budget=budget, chosen=subset.chosen)
        stacks = deque[ExitStack]()  # of each epoch whose batches are being made, and of the one before

        def plans() -> Iterator[Plan]:
            for epoch, steps in epoch_steps:
                stacks.append(stack := ExitStack())
                feed = shards and stack.enter_context(shards.epoch(epoch.plan, epoch.number, epoch.first))
                order = None if subset.weights else plan.shard_order(epoch.number)  # weights change the order
                ahead = stack.enter_context(read_ahead(order))
                for step in steps:
                    items = subset.items_at(epoch.batch(step), epoch.number)
                    for reader in ahead if len(items) else ():  # all records of a batch may be omitted
                        reader.expect(items["number"])
                    request = results.request(items)
                    yield from feed.plans(request, step) if feed else (request,)
                while len(stacks) > 1:
                    stacks.popleft().close()

        def batches() -> Batches:
            try:
                yield from engine.run(plans())
            finally:
                while stacks:
                    stacks.popleft().close()

        self._latest_batches = latest = batches()
        return latest  # another thread may close the loader meanwhile

    @property
    def most_held(self) -> int:
        """Number of batches that may be held at once before further ones are copied."""
        return self.engine.most_held

    def steps(self, epoch: int, steps: Iterable[int]) -> Iterator[LoadedStep]:
        """Yield the batches of these steps of an epoch, counted from its beginning, in the order given.

        ``steps`` are drawn at most twice ``slots`` ahead. The loader's place and receipt do not change, but a
        running iteration ends. Raises IndexError for a step that does not exist.
        """
        if self._steps_epoch is None or self._steps_epoch.number != epoch:
            self._steps_epoch = Epoch(self._plan, epoch)
        whole, (planned_steps, made_steps) = self._steps_epoch, tee(steps)

        def loaded(batch: EngineBatch) -> LoadedStep:
            return whole.make_step(next(made_steps), *self._take_parts(batch))

        with closing(self._batches([(whole, planned_steps)])) as batches:
            yield from map(loaded, batches)

    def _deliver(self, epoch: Epoch, batch: EngineBatch) -> tuple[Any, ...]:
        if epoch is not self._current_epoch:
            raise UsageError("another iteration of this Loader has begun; end the first, or make two")
        columns, delivered, skipped = self._take_parts(batch)
        epoch.record_delivery(delivered, skipped.tolist())
        self._state_epoch = epoch
        return tuple(columns)

    def _take_parts(self, batch: EngineBatch) -> tuple[list[Any], Records, Records]:
        """Return the parts without skipped rows, and the places of both; record the skipped."""
        bad = batch.skipped.items()
        self._skipped.update((self.key(batch.items["number"][row]), reason) for row, reason in bad)
        return self._make_parts(self._results, batch)

    @property
    def records(self) -> Records:
        """The record numbers of the next epoch's places, over all ranks, in stored order: int64.

        Includes records omitted by ``without``, so that the numbers in a receipt index it.
        """
        return self._subset.numbers(self.epoch)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch."""
        return len(self._plan.split(0))

    @property
    def batch_specs(self) -> tuple[BatchSpec, ...] | None:
        """The parts of a batch; None for a transform that declares no outputs."""
        transform, omission = self._work.transform, self._plan.omission
        outputs = None if transform is None else outputs_of(transform)
        if transform is not None and outputs is None:
            return None
        is_constant = self._plan.drop_last and not self._work.skip_bad and omission.closes_gaps
        rows = self._plan.batch_size if is_constant else None
        return loader_specs(outputs, rows=rows, with_numbers=self._with_numbers)

    @property
    def batch_bytes(self) -> int | None:
        """Bytes of the arrays of a full batch; None for a transform that declares no outputs.

        Raises UsageError if they have no fixed size.
        """
        specs = self.batch_specs
        return None if specs is None else self._plan.batch_size * sum(spec.row_bytes for spec in specs)

    def first_batch(self) -> tuple[Any, ...]:
        """Return the next epoch's first batch, made by :meth:`steps`, without counting it as delivered."""
        with closing(self.steps(self.epoch, [0])) as steps:  # type: ignore[type-var]
            batch: tuple[Any, ...] = next(steps).batch
        return batch

    @property
    def identity(self) -> dict[str, str]:
        """The values that determine the batches, by name; equal identities mean bit-for-bit equal batches.

        Raises UsageError for a transform that cannot be compared.
        """
        plan, work = self._plan, self._work
        columns = work.parts[0].columns
        values = {
            "dataset": plan.dataset,
            "shuffle": json.dumps(plan.shuffle.to_json() if plan.shuffle else None),
            "seed": str(plan.seed),
            "batch size": str(plan.batch_size),
            "drop_last": str(plan.drop_last),
            "rank": f"{plan.rank} of {plan.world_size}",
            "labels": digest_of(work.label_map),
            "record numbers": str(self._with_numbers),
            "bad records": "skipped" if work.skip_bad else "raised",
            "transform": "none",
        }
        if columns or not work.with_image:
            values["columns"] = json.dumps([work.with_image, *(entry.field.to_json() for entry in columns)])
        if work.transform is not None:
            digest = self._transform_digest or digest_of(work.transform)  # which raises the error
            values["transform"] = f"{transform_name(work.transform)} {digest}"
            decoder = check_decoder()
            own = f", with the pixels {decoder.digest}" if decoder.differing else ""
            values["OpenCV"] = cv2.__version__ + own
        return values

    def key(self, number: int) -> str:
        """Return the key of the record with this number. Raises UsageError if there is none."""
        number = check_int(number, "a record number", least=0, most=len(self.dataset) - 1)
        key: bytes = self.dataset.index["key"][number]
        return key.decode(errors="replace")

    @property
    def epoch(self) -> int:
        """The number of the next iteration's epoch."""
        return self._next_epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch."""
        self._next_epoch = self._state_epoch = Epoch(self._plan, epoch)

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
        epoch = self._next_epoch
        try:
            numbers = [check_int(step, "each of the steps", least=0) for step in steps]
        except TypeError as error:
            raise UsageError(f"steps must be a list or a range of step numbers, not {steps!r}") from error
        plan = epoch.plan.skip_steps(numbers, start=epoch.start)
        same = {name: getattr(epoch, name) for name in ("start", "receipt", "origin", "since")}
        changed = Epoch(plan, epoch.number, **same)
        others = [changed if each is epoch else each for each in (self._current_epoch, self._state_epoch)]
        self._next_epoch, self._current_epoch, self._state_epoch = changed, *others

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place as plain JSON values; its size grows only with the skipped records.

        The last batch yielded counts as delivered. :meth:`load_state_dict` continues after it, even with
        other workers, batch size or world size. After :meth:`set_epoch` the place is that epoch's start. For
        replays, a Loader's state includes its :meth:`card`, without the numbers of chosen records and without
        the identity of the transform, which is valid for one version of each library. Loading does not need
        it.
        """
        if self._state_card is None:
            self._state_card = self._card(identity=None).without_numbers()
        place = self._next_epoch if self._state_epoch.is_over else self._state_epoch
        return place.state() | {"card": self._state_card.to_json(), "transform": self._transform_state}

    def load_state_dict(self, state: dict[str, Any], *, transform: TransformRule = "same") -> None:
        """Continue the next iteration where the state was taken. On a UsageError nothing changes.

        Each rank loads its own state; with another world size, all ranks load the state of one. The dataset,
        the order, ``labels`` and the transform must be those of the state; ``transform="changed"`` accepts
        any transform for the rest of the epoch. Warns with DecoderDiffers if images were decoded to other
        pixels before.
        """
        epoch = resume_epoch(self._plan, state)
        current = self._transform_state
        check_transforms([state.get("transform", current)], [current], transform)  # older states have none
        labels, decoder = self.dataset.label_space, None
        with suppress(KeyError, TypeError):  # older states have no card
            labels, decoder = state["card"]["labels"], state["card"]["versions"]["decoder"]
        if labels != self.dataset.label_space:
            raise UsageError(f"the state is from a loader with labels={labels!r}; use the same")
        if current is not None and isinstance(decoder, str):
            warn_of_other_decoder(decoder)
        self._next_epoch = self._current_epoch = self._state_epoch = epoch

    def receipt(self) -> Receipt:
        """Return the receipt for this rank's deliveries of the current epoch, or of the last one.

        For a subset, the receipt counts places in :attr:`records` instead of record numbers.
        """
        return self._current_epoch.receipt

    def log_epoch(self, path: str | os.PathLike[str]) -> None:
        """Append this rank's part of the current epoch to a log for ``prep prove``; call it after each epoch.

        Writes and flushes a line of JSON. Each rank may have its own file, or all share one on a local disk.
        If the epoch is resumed later, the rank's next line replaces this one. Raises UsageError for a signed
        log, OSError.
        """
        epoch = self._current_epoch
        places = epoch.start, epoch.place, epoch.origin
        LogEntry(self.card(), epoch.receipt, *places, epoch.plan.passed, epoch.since).append_to(path)

    @property
    def skipped(self) -> dict[str, str]:
        """The bad records skipped so far: key to reason."""
        return dict(self._skipped)

    def stats(self) -> LoaderStats:
        """Return printable counts and times since the loader was made. Thread-safe."""
        return LoaderStats(
            **vars(self.engine.stats()),
            workers=self._workers,
            cpus=usable_cpus(),
            image_bytes=self._mean_bytes,
            crop_ready=self._subset.crop_ready_share,
            course=self.engine.course.points(),
            storage=self._shards.counts if self._shards else StorageCounts(),
        )

    def replay(
        self, epoch: int, step: int, *, start: int = 0, passed: Sequence[Sequence[int]] = ()
    ) -> Replayed:
        """Reproduce a step of an epoch on this rank: its records, keys, labels, crops and batch.

        The batch is bit for bit that of an iteration, but is made in this process, from these records alone.
        The loader's place, receipt and iteration do not change; it also works once the loader is closed.
        Steps are counted from the epoch's beginning, or from the place ``start`` (``"start"`` of a state)
        from which a run continued with another batch size or world size. Steps left out by :meth:`skip`
        count, too, unless ``passed`` (``"passed"`` of a state) lists them. Raises IndexError for a step that
        does not exist, UsageError for a negative one, and the errors of an iteration over these records.
        """
        step, start = check_int(step, "step", least=0), check_int(start, "start", least=0)
        plan = replace(self._plan, passed=parse_ranges(passed, sum(self._plan.shard_counts)))
        places = Epoch(plan, epoch, start=start).batch(step)
        items, shown = self._subset.items_at(places, epoch), dict[int, ShownParts]()

        def observe(row: int, *call: Any) -> None:
            shown[row] = shown_parts(self.transform, *call)

        work = replace(self._work, observe=observe)
        needed = self._shards and self._shards.hold_downloaded(np.unique(items["shard"]).tolist())
        with needed or nullcontext(), work.open(np.zeros(len(work.stages))) as fill:
            batch = fill_batch(fill, step, items, layout=self.engine.layout, describe_row=_describe_row)
        parts, _, _ = self._make_parts(Results(self._work.transform, room=0), batch)
        rows = zip(items["number"].tolist(), self._labels[items["label"]].tolist(), strict=True)
        records = (
            ReplayedRecord(number, self.key(number), label, shown.get(row, ()), batch.skipped.get(row))
            for row, (number, label) in enumerate(rows)
        )
        return Replayed(epoch, step, tuple(parts), tuple(records))

    def show_batch(self, epoch: int | None = None, step: int = 0, *, most: int = 16) -> Gallery:
        """Return the images of a step as training gets them: pictures in a notebook, a list in a terminal.

        ``epoch`` defaults to the next one. At most ``most`` images are shown, up to 100, each with the
        number, key and class of its record; normalised pixels are shown as they were before. :meth:`replay`
        makes the batch, so the loader's place does not change. Raises the errors of a replay, and UsageError
        for a batch without images.
        """
        replayed = self.replay(self.epoch if epoch is None else epoch, step)
        count = min(check_int(most, "most", least=0), MAX_SHOWN, len(replayed))
        pictures = pictures_of(replayed.batch, self.transform)[:count]
        labels, classes = self.dataset.index["label"], self.dataset.classes
        shown = []
        for record, picture in zip(replayed.delivered, pictures, strict=False):
            name = f", {classes[label]}" if (label := labels[record.number]) >= 0 else ""
            shown.append(ShownImage(encode_png(picture), f"{record.number:,}: {record.key}{name}"))
        title = f"{self!r}: {count} of {len(replayed):,} images of step {replayed.step:,} of epoch {replayed.epoch:,}"
        return Gallery(title, shown)

    def _make_parts(self, results: Results, batch: EngineBatch) -> tuple[list[Any], Records, Records]:
        """Return the parts without skipped rows, and the places of both."""
        bad = list(batch.skipped)
        numbers: npt.NDArray[np.int64] = np.ascontiguousarray(batch.items["number"])
        labels = self._labels[batch.items["label"]]  # the workers have checked them against the records
        places = self._subset.places_of(batch.items)
        own = (places, labels, numbers) if self._with_numbers else (places, labels)
        delivered, *columns = delete_rows(bad, own)
        return [*results.parts(batch, bad), *columns], delivered, places[bad]

    def card(self) -> RunCard:
        """Return everything that determines this rank's batches; ``card().save(path)`` writes a file."""
        return self._card(self._transform_digest)

    def parting(self, other: Loader, epochs: Iterable[int] = (0,)) -> Parting | None:
        """Return the first step and record at which another loader's run differs, and why; None if none.

        Compares the settings, and the order and labels of these ``epochs``; reads no image.
        """
        if not isinstance(other, Loader):
            raise UsageError(f"parting compares two Loaders, not one with {other!r}")
        return first_parting(self.order_of(), other.order_of(), epochs)

    def order_of(self, card: RunCard | None = None) -> RunOrder:
        """Describe this loader's run for :func:`.first_parting`; ``card`` defaults to its own."""
        label_of = self._labels[self.dataset.index["label"]]
        passed = {e.number: e.plan.passed for e in (self._current_epoch, self._next_epoch) if e.plan.passed}
        return RunOrder(card or self.card(), self._plan, self._subset.numbers_at, label_of, passed)

    @property
    def transform(self) -> Transform | None:
        """The transform that was given; None if columns are delivered as they are."""
        transform = self._work.transform
        return None if isinstance(transform, AsColumns) else transform

    def _card(self, identity: str | None) -> RunCard:
        chosen, transform = self._subset.chosen, self.transform
        omission = self._subset.omission
        versions = {"shardprep": version("shardprep"), "opencv": cv2.__version__, "numpy": np.__version__}
        return RunCard(
            **{name: getattr(self._plan, name) for name in PLAN_SETTINGS},
            versions=versions | {"decoder": check_decoder().digest},
            dataset=self.dataset.root,
            split=self.dataset.split,
            records=None if chosen is None else ChosenRecords.of(chosen),
            labels=self.dataset.label_space,
            columns=self._columns,
            weights=self._weights,
            on_bad_record="skip" if self._work.skip_bad else "raise",
            with_numbers=self._with_numbers,
            transform=None if transform is None else TransformCard.of(transform, identity),
            without=ChosenRecords.of(self._subset.omitted) if omission else None,
            gaps=None if not omission else "close" if omission.closes_gaps else "keep",
        )

    def shuffle_quality(self, epoch: int = 0) -> ShuffleQuality:
        """Measure how well the batches of an epoch are mixed, against a full shuffle. Reads no record."""
        labels = self.dataset.index["label"][self._subset.numbers(epoch)]
        return shuffle_quality(self._plan, labels, check_int(epoch, "epoch", least=0))

    def __repr__(self) -> str:
        records, of, plan = len(self._subset), len(self.dataset), self._plan
        counts = f"{of:,}" if records == of else f"{records:,} of {of:,}"
        rank = f", rank {plan.rank} of {plan.world_size}" if plan.world_size > 1 else ""
        omitted = f" without {len(plan.omission):,} of them" if plan.omission else ""
        return (
            f"<Loader {self.dataset.location!r}: {counts} records{omitted} in batches of {plan.batch_size:,}{rank}, "
            f"{count_of(self._workers, 'worker')}, epoch {self.epoch} next>"
        )

    def close(self) -> None:
        """Stop the workers and release memory and files; delivered batches stay valid. Idempotent."""
        self._latest_batches = None
        self._close_early_epoch()
        self.engine.close()
        if self._shards:
            self._shards.close()
        self.dataset.close()


def _describe_row(row: int, step: int, item: Any) -> str:
    return f"at row {row} of step {step}: {printable(describe_item(item))}"
