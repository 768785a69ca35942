"""Any items as a dataset: written once, published last, recognised when it is complete."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.finish import finish, shard_rows, verify_finished
from shardprep.formats.conversion.plan import Plan, PlannedShard, PlanOptions, plan
from shardprep.formats.conversion.prepare import (
    PreparedSplit,
    check_output,
    check_room,
    refuse_network,
    refuse_other_shape,
)
from shardprep.formats.conversion.saved_items import (
    KEY_DIGITS,
    EncodedItem,
    FetchingBuilder,
    GivenSchema,
    HeldItems,
    ItemCoder,
    NumberedItems,
    OpenedItems,
    bad_item,
    entries_of,
    held_job,
    kept_of,
    opened_items,
)
from shardprep.formats.conversion.shard import BuiltShard, ShardJob, build_shard, shard_jobs, trusted_commit
from shardprep.formats.errors import PlanMismatch, UsageError
from shardprep.formats.records.items import LAYOUT
from shardprep.formats.records.record import GIVEN, GIVEN_SHUFFLED, MAX_KEY_BYTES, is_class_sorted
from shardprep.formats.runtime.files import user_path
from shardprep.formats.runtime.jobs import JobRunner, ProgressCounters
from shardprep.formats.runtime.processes import packed
from shardprep.formats.runtime.progress import ItemBar, Progress
from shardprep.formats.runtime.work_folder import (
    WorkFolder,
    finished_shards,
    noting_kept,
    refuse_busy,
    refuse_other_plan,
)
from shardprep.formats.runtime.workers import usable_cpus
from shardprep.formats.shards.container import SUFFIXES, Extent
from shardprep.formats.shards.files import OUTPUT_FILES
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.sources.listing import repeated_keys
from shardprep.formats.sources.source import SPLITS, Entries, Listing, entry_dtype

_ITEMS_PER_UPDATE = 64  # of the progress


@dataclass(frozen=True)
class NumberedShards:
    """Builds the shards of items with numbers: each is a job, and finished ones are kept.

    The items are fetched in the workers, or here if they cannot be sent to another process.
    """

    source: NumberedItems
    coder: ItemCoder
    planned: Plan
    workers: int | None
    progress: Progress

    def build(self, work_folder: WorkFolder) -> tuple[Plan, list[BuiltShard]]:
        """Return the plan and its shards, in order."""
        shards = self.planned.shards
        jobs = shard_jobs(self.planned, shards, HeldItems(), work_folder)
        runner = JobRunner(self.workers, progress=self.progress)
        return self.planned, runner.run("save", self._filled(jobs), work_folder.run, shards)

    def _filled(self, jobs: Iterator[ShardJob]) -> Iterator[ShardJob]:
        elsewhere = None if self.workers == 0 else self.source.elsewhere()
        source = None if elsewhere is None else packed(elsewhere)
        if source is None:
            return self._held(list(jobs))
        builder = FetchingBuilder(source, self.coder)
        return (replace(job, builder=builder) for job in jobs)

    def _held(self, jobs: list[ShardJob]) -> Iterator[ShardJob]:
        """Yield the jobs, each with its items; in one pass over the items of unfinished shards."""
        wanted = {job.shard.number: trusted_commit(job) is None for job in jobs}
        numbers = [number for job in jobs if wanted[job.shard.number] for number in _numbers(job)]
        items = map(self.coder.encode, numbers, self.source.pick(iter(numbers)))
        for job in jobs:
            if wanted[job.shard.number]:
                own = _numbers(job)
                yield held_job(job, list(islice(items, len(own))), own)
            else:
                yield job


def _numbers(job: ShardJob) -> list[int]:
    numbers: list[int] = job.entries["offset"].tolist()
    return numbers


@dataclass(frozen=True)
class StreamedShards:
    """Builds the shards of an iterator, in this process and one after the other, in one pass.

    A shard is cut before the item that would make it larger than the shard size. Nothing is kept of an
    earlier run.
    """

    items: Iterator[Any]
    coder: ItemCoder
    planned: Plan
    total: int
    progress: Progress

    def build(self, work_folder: WorkFolder) -> tuple[Plan, list[BuiltShard]]:
        """Return the plan with the shards that were cut, and these."""
        planned, built = [], []
        with self.progress.task("save", records=self.total, size=0):
            done = 0
            for number, items in enumerate(self._groups()):
                job = self._job(work_folder, number, done, items)
                planned.append(job.shard)
                built.append(build_shard(job))
                done += len(items)
        order = np.arange(done, dtype=np.uint32)
        return replace(self.planned, shards=tuple(planned), order=order), built

    def _groups(self) -> Iterator[list[EncodedItem]]:
        limit, size, done = self.planned.options.shard_size, 0, 0
        group: list[EncodedItem] = []
        for number, item in zip(count(), self.items, strict=False):
            found = self.coder.encode(number, item)
            more = found.size
            if group and size + more > limit:
                yield group
                group, done, size = [], done + size, 0
            group.append(found)
            size += more
            if not number % _ITEMS_PER_UPDATE:
                self.progress.at(number, done + size)
        if group:
            yield group

    def _job(self, work_folder: WorkFolder, number: int, first: int, items: list[EncodedItem]) -> ShardJob:
        name = f"shard-{number:05d}{SUFFIXES[self.planned.options.container]}"
        shard = PlannedShard(name, number, first, first + len(items), Extent(len(items), 0, 1))
        ProgressCounters(work_folder.run, [shard])
        plan = replace(self.planned, shards=(shard,))
        (job,) = shard_jobs(plan, [shard], HeldItems(), work_folder)
        return held_job(job, items, range(first, first + len(items)))


ShardBuilding = NumberedShards | StreamedShards

DEFAULT_SHARD_SIZE = 64 << 20
START_S = 0.75  # until a worker process builds its first shard
BYTES_PER_SECOND = 500e6  # that one process hashes, writes and reads back
ORDERS = {"given": GIVEN, "shuffled": GIVEN_SHUFFLED}


def write_dataset(
    samples: Iterable[Any] | NumberedItems,
    output: str | os.PathLike[str],
    *,
    schema: GivenSchema | None = None,
    classes: Sequence[str] | None = None,
    split: str = "train",
    container: str = "lmdb",
    shard_size: int = DEFAULT_SHARD_SIZE,
    order: str = "given",
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
    restart: bool = False,
) -> Manifest:
    """Write any items as a dataset, and return its manifest.

    The items are dicts, tuples, lists, records or bare values, all of one form: ``Flow.from_dataset(output)``
    yields equal items of that form. In dicts, "key" (unique text), "image" (an image file's bytes) and
    "label" (an integer from -1 on, or the name of one of ``classes``) are the record's own; all other names
    are columns. Without a key, it is the item's number with eight digits. Tuples and lists have the columns
    "0", "1", ...; a bare value has the column "value". An item counts as 1 KiB at least, and a process holds
    the values of a shard in memory.

    Items with numbers (a sequence, a :class:`.Dataset`, a Flow over these) are written by processes, and must
    be the same whenever they are picked: after a kill at any point, the same call keeps the finished shards,
    and the bytes do not depend on interruptions and workers. Any other iterable is written in one pass in
    this process, one shard in memory, and begins anew after a kill. The manifest is published last, so there
    is a complete dataset or none. A finished ``output`` of the same items, by their number, schema, options
    and first 100, is only verified.

    Args:
        samples: An iterable of items.
        output: Folder of the dataset.
        schema: A :class:`.Schema`, or a mapping of names to kinds such as ``{"boxes": "float32[*,4]"}``, of
            all columns. None finds it from the first 100 items: bytes, text, integers, floats and arrays as
            they are, with ``*`` where their sizes differ, and None, booleans, lists and dicts as "json".
        classes: Names of all classes, where labels are names.
        split: "train", "val" or "test".
        container: "lmdb" or "hdf5".
        shard_size: Bytes of values per shard.
        order: "given" or, for items with numbers, "shuffled" by ``seed``.
        seed: Seed of the order, 0 to 2**64 - 1.
        workers: Number of processes for items with numbers; None is one per usable CPU, or none if this
            process is done in about a second, and 0 works in this process.
        progress: Receives the progress; None shows a bar with the rate on a terminal or in a notebook.
        restart: Whether to discard an unfinished output.

    Returns:
        The manifest of the finished dataset.

    Raises:
        BadItem: A DataError; an item differs from the others, or repeats a key.
        UsageError: An argument is not valid; PlanMismatch if ``output`` holds something else.
        OperationError: OutputBusy, NoSpace or WorkerDied.
        OSError: A file cannot be read or written. What making an item raises is raised unchanged.
    """
    if split not in SPLITS:
        raise UsageError(f"the split is one of {', '.join(SPLITS)}, not {split!r}")
    if order not in ORDERS:
        raise UsageError(f"the order is one of {', '.join(ORDERS)}, not {order!r}")
    options = PlanOptions(container=container, shard_size=shard_size, order=ORDERS[order], seed=seed)
    folder, progress = user_path(output), progress or ItemBar()
    refuse_other_shape(folder, split)
    refuse_busy(folder)
    items = opened_items(samples, schema, classes)
    if order == "shuffled" and items.numbered is None:
        raise UsageError(
            "only items with numbers can be shuffled: give a sequence, or a flow over one, or shuffle the flow"
        )
    prepared = _prepared(items, folder, split, options)
    building: ShardBuilding
    if items.numbered is None:
        total = operator.length_hint(samples, 0)
        building = StreamedShards(items.rest, items.coder, prepared.planned, total, progress)
    else:
        if workers is None and _is_soon_done(items, len(items.numbered)):
            workers = 0
        building = NumberedShards(items.numbered, items.coder, prepared.planned, workers, progress)
    return _saved(prepared, building, progress, restart=restart)


def _is_soon_done(items: OpenedItems, count: int) -> bool:
    """Whether processes would take longer to start than they save, by the first of so many items."""
    size = sum(item.size for item in items.first) / len(items.first)
    seconds = count * (items.seconds + size / BYTES_PER_SECOND)
    return seconds * (1 - 1 / usable_cpus()) < START_S


def _prepared(items: OpenedItems, output: Path, split: str, options: PlanOptions) -> PreparedSplit:
    """Return the plan: of all items with numbers, else of the first ones, which stand for all."""
    if items.numbered is None:
        entries = entries_of(items.first, range(len(items.first)))
    else:
        entries = _entries(len(items.numbered), items)
    listing = Listing(
        split=split,
        layout=LAYOUT,
        entries=entries,
        labels=items.coder.labels(-1),
        reader=HeldItems(),
        options=kept_of(items.coder.form, items.first),
        schema=items.coder.schema,
        has_images=items.coder.has_images,
    )
    planned = plan(listing, options)
    return PreparedSplit(output, listing, planned, None, planned.shards)


def _entries(count: int, items: OpenedItems) -> Entries:
    """Return a row for each number: the sizes are the mean of the first items, the keys those of none."""
    entries = np.zeros(count, entry_dtype(max(KEY_DIGITS, len(str(count))), 1))
    entries["offset"] = np.arange(count)
    entries["key"] = np.char.zfill(entries["offset"].astype("S"), KEY_DIGITS)
    entries["label"] = -1
    entries["length"] = -(-sum(item.size for item in items.first) // len(items.first))
    return entries


def _saved(
    prepared: PreparedSplit, building: ShardBuilding, progress: Progress, *, restart: bool
) -> Manifest:
    """Write the dataset, or verify a finished one."""
    if not prepared.is_finished:
        _check(prepared, building, restart=restart)
        with (
            noting_kept(partial(_kept, prepared, building), restarted=restart),
            WorkFolder(prepared.output) as work_folder,
        ):
            if not prepared.is_finished:  # another run may have finished it since
                if restart:
                    work_folder.discard(OUTPUT_FILES)
                work_folder.claim(prepared.guard())
                if isinstance(building, StreamedShards):  # there is nothing to find the next item by
                    work_folder.discard(OUTPUT_FILES)
                    work_folder.claim(prepared.guard())
                planned, built = building.build(work_folder)
                planned, largest = _completed(planned, work_folder, built)
                listing = replace(prepared.listing, labels=building.coder.labels(largest))
                return finish(work_folder, replace(prepared, planned=planned, listing=listing), built)
    return _already_there(prepared, progress)


def _check(prepared: PreparedSplit, building: ShardBuilding, *, restart: bool) -> None:
    check_output(prepared.output)
    refuse_network(prepared.output, prepared.planned.options.container)
    if not restart:
        refuse_other_plan(prepared.output, prepared.guard())
    if isinstance(building, NumberedShards):
        check_room({prepared.output: prepared.bytes_to_write(prepared.shards)})


def _kept(prepared: PreparedSplit, building: ShardBuilding) -> str:
    """Return how many shards the next run keeps; empty if none."""
    done = 0 if isinstance(building, StreamedShards) else len(finished_shards(prepared.output))
    return f"{done} of {len(prepared.planned.shards)} shards are done" if done else ""


def _completed(planned: Plan, work_folder: WorkFolder, built: list[BuiltShard]) -> tuple[Plan, int]:
    """Return what only all items together show: the order of classes, the widest key, the largest label.

    Raises BadItem for a key that occurs twice.
    """
    found = [(rows["row"]["key"], rows["row"]["label"]) for rows in shard_rows(work_folder, built)]
    keys, labels = (np.concatenate(each) for each in zip(*found, strict=True))
    for key in repeated_keys(keys):
        first, second = sorted(planned.order[np.flatnonzero(keys == key)[:2]].tolist())
        raise bad_item(second, f"its key is that of item {first}, {key.decode()!r}")
    width = min(keys.dtype.itemsize, MAX_KEY_BYTES)
    return replace(planned, class_sorted=is_class_sorted(labels), key_bytes=width), int(labels.max())


def _already_there(prepared: PreparedSplit, progress: Progress) -> Manifest:
    """Verify a finished output. Raises PlanMismatch if it has other items, DataError if it is damaged."""
    output, kept = prepared.output, prepared.listing.options
    manifest = prepared.finished_manifest()
    if {name: manifest.source.get(name) for name in kept} != kept:
        raise PlanMismatch(
            "holds a finished dataset of other items; choose another folder, or remove this one", path=output
        )
    verify_finished(output, progress)
    return manifest
