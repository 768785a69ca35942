"""Any items as a dataset: written once, published last, recognised when it is complete."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.convert import discard_unfinished
from shardprep.formats.conversion.finish import finish, shard_rows, verify_finished
from shardprep.formats.conversion.plan import Plan, PlannedShard, PlanOptions, plan
from shardprep.formats.conversion.prepare import (
    ConvertOptions,
    PreparedSplit,
    check_room,
    refuse_other_shape,
)
from shardprep.formats.conversion.saved_items import (
    KEY_DIGITS,
    EncodedItem,
    GivenSchema,
    HeldItems,
    ItemCoder,
    NumberedItems,
    OpenedItems,
    bad_item,
    build_fetched,
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
from shardprep.formats.runtime.progress import BarProgress, Progress, in_notebook
from shardprep.formats.runtime.work_folder import WorkFolder, finished_shards, noting_kept, refuse_busy
from shardprep.formats.runtime.workers import usable_cpus
from shardprep.formats.shards.container import SUFFIXES, Extent
from shardprep.formats.shards.files import OUTPUT_FILES
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.sources.listing import repeated_keys
from shardprep.formats.sources.source import SPLITS, Entries, Listing, Problems, entry_dtype

ITEMS_PER_UPDATE = 64  # of the progress
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
    folder = user_path(output)
    progress = progress or BarProgress("items", visible=sys.stderr.isatty() or in_notebook())
    refuse_other_shape(folder, split)
    refuse_busy(folder)
    items = opened_items(samples, schema, classes)
    if order == "shuffled" and items.numbered is None:
        raise UsageError(
            "only items with numbers can be shuffled: give a sequence, or a flow over one, or shuffle the flow"
        )
    if items.numbered is not None and workers is None and _is_soon_done(items, len(items.numbered)):
        workers = 0
    prepared, problems = _prepared(items, folder, split, options), Problems()
    prepared.check_output((), ConvertOptions(restart=restart), problems)
    problems.raise_all()
    if items.numbered is not None and not prepared.is_finished:
        check_room({folder: prepared.bytes_to_write(prepared.shards)})

    def kept() -> str:
        done = 0 if items.numbered is None else len(finished_shards(folder))
        return f"{done} of {len(prepared.shards)} shards are done" if done else ""

    with noting_kept(kept, restarted=restart):
        if restart:
            discard_unfinished([prepared])
        with prepared.begun() as work_folder:
            if work_folder is not None:
                if items.numbered is not None:
                    planned, built = prepared.planned, _built(prepared, items, workers, work_folder, progress)
                else:
                    total = operator.length_hint(samples, 0)
                    planned, built = _streamed(prepared, items, total, work_folder, progress)
                return _finished(work_folder, replace(prepared, planned=planned), items.coder, built)
    manifest, of_items = prepared.finished_manifest(), prepared.listing.options
    if {name: manifest.source.get(name) for name in of_items} != of_items:
        raise PlanMismatch(
            "holds a finished dataset of other items; choose another folder, or remove this one", path=folder
        )
    verify_finished(folder, progress)
    return manifest


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
    return PreparedSplit(output, planned, None, planned.shards)


def _entries(count: int, items: OpenedItems) -> Entries:
    """Return a row for each number: the sizes are the mean of the first items, the keys those of none."""
    entries = np.zeros(count, entry_dtype(max(KEY_DIGITS, len(str(count))), 1))
    entries["offset"] = np.arange(count)
    entries["key"] = np.char.zfill(entries["offset"].astype("S"), KEY_DIGITS)
    entries["label"] = -1
    entries["length"] = -(-sum(item.size for item in items.first) // len(items.first))
    return entries


def _built(
    prepared: PreparedSplit,
    items: OpenedItems,
    workers: int | None,
    work_folder: WorkFolder,
    progress: Progress,
) -> list[BuiltShard]:
    """Build each shard of items with numbers that is not finished.

    The items are fetched in the workers, or here if they cannot be sent to another process.
    """
    source, coder, shards = items.numbered, items.coder, prepared.shards
    elsewhere = None if source is None or workers == 0 else source.elsewhere()
    data = None if elsewhere is None else packed(elsewhere)
    builder = None if data is None else partial(build_fetched, data, coder)
    jobs = shard_jobs(prepared.planned, shards, work_folder, builder=builder)
    if source is not None and builder is None:
        jobs = _held(list(jobs), source, coder)
    return JobRunner(workers, progress=progress).run("save", jobs, work_folder.run, shards)


def _held(jobs: list[ShardJob], source: NumberedItems, coder: ItemCoder) -> Iterator[ShardJob]:
    """Yield the jobs, each with its items; in one pass over the items of unfinished shards."""
    numbers = [[] if trusted_commit(job) else job.entries["offset"].tolist() for job in jobs]
    wanted = list(chain.from_iterable(numbers))
    items = map(coder.encode, wanted, source.pick(iter(wanted)))
    for job, own in zip(jobs, numbers, strict=True):
        yield held_job(job, list(islice(items, len(own))), own) if own else job


def _streamed(
    prepared: PreparedSplit, items: OpenedItems, total: int, work_folder: WorkFolder, progress: Progress
) -> tuple[Plan, list[BuiltShard]]:
    """Draw an iterator's items, one shard after the other; return the plan with the shards, and these.

    Nothing is kept of an earlier run: there is nothing to find the next item by.
    """
    work_folder.discard(OUTPUT_FILES)
    work_folder.claim(prepared.guard())
    planned, shards, built, done = prepared.planned, list[PlannedShard](), list[BuiltShard](), 0
    with progress.task("save", records=total, size=0):
        for group in _groups(items, planned.options.shard_size, progress):
            number, first, done = len(shards), done, done + len(group)
            name = f"shard-{number:05d}{SUFFIXES[planned.options.container]}"
            shard = PlannedShard(name, number, first, done, Extent(len(group), 0, 1))
            ProgressCounters(work_folder.run, [shard])
            (job,) = shard_jobs(replace(planned, shards=(shard,)), [shard], work_folder)
            built.append(build_shard(held_job(job, group, range(first, done))))
            shards.append(shard)
    return replace(planned, shards=tuple(shards), order=np.arange(done, dtype=np.uint32)), built


def _groups(items: OpenedItems, shard_size: int, progress: Progress) -> Iterator[list[EncodedItem]]:
    """Yield the items of each shard, which is cut before the item that would make it too large."""
    size = done = 0
    group: list[EncodedItem] = []
    for number, item in enumerate(items.rest):
        found = items.coder.encode(number, item)
        if group and size + found.size > shard_size:
            yield group
            group, done, size = [], done + size, 0
        group.append(found)
        size += found.size
        if not number % ITEMS_PER_UPDATE:
            progress.at(number, done + size)
    if group:
        yield group


def _finished(
    work_folder: WorkFolder, prepared: PreparedSplit, coder: ItemCoder, built: list[BuiltShard]
) -> Manifest:
    """Finish with what only all items show: the order of classes, the widest key, the largest label.

    Raises BadItem for a key that occurs twice.
    """
    found = [(rows["row"]["key"], rows["row"]["label"]) for rows in shard_rows(work_folder, built)]
    keys, labels = (np.concatenate(each) for each in zip(*found, strict=True))
    for key in repeated_keys(keys):
        first, second = sorted(prepared.planned.order[np.flatnonzero(keys == key)[:2]].tolist())
        raise bad_item(second, f"its key is that of item {first}, {key.decode()!r}")
    planned = replace(
        prepared.planned,
        listing=replace(prepared.listing, labels=coder.labels(int(labels.max()))),
        class_sorted=is_class_sorted(labels),
        key_bytes=min(keys.dtype.itemsize, MAX_KEY_BYTES),
    )
    return finish(work_folder, replace(prepared, planned=planned), built)
