"""Writing any items as a dataset.

Items either have numbers or come from an iterator. They are encoded, and held until their shard is written.
"""

from __future__ import annotations

import hashlib
import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np

from shardprep.formats.conversion.convert import convert_splits, verify_finished
from shardprep.formats.conversion.plan import PlanOptions, make_plan
from shardprep.formats.conversion.prepare import ConvertOptions, PreparedSplit, check_room, refuse_other_shape
from shardprep.formats.conversion.shard import (
    BuiltShard,
    ShardJob,
    build_shard,
    finish,
    read_shard_rows,
    read_trusted_commit,
    shard_jobs,
)
from shardprep.formats.errors import DataError, PlanMismatch, UsageError
from shardprep.formats.records.record import (
    GIVEN,
    GIVEN_SHUFFLED,
    LAYOUT,
    MAX_KEY_BYTES,
    SPACES,
    UNLABELLED,
    ItemForm,
    LabelSpace,
    is_class_sorted,
)
from shardprep.formats.records.schema import (
    FIRST_ITEMS,
    BadValue,
    Field,
    ImageCodec,
    Schema,
    TextCodec,
    bad_value,
    class_number,
    encode_exactly,
    infer_schema,
    refuse_masked,
    split_schema,
)
from shardprep.formats.runtime.jobs import JobRunner, ProgressCounters, Unit
from shardprep.formats.runtime.json_record import is_text
from shardprep.formats.runtime.processes import pickle_for_worker, usable_cpus
from shardprep.formats.runtime.progress import BarProgress, Progress, in_notebook, progress_or_bar
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.runtime.work_folder import WorkFolder, refuse_busy
from shardprep.formats.shards.columns import BOX_COLUMNS
from shardprep.formats.shards.dataset import SPLITS, Dataset
from shardprep.formats.shards.manifest import Manifest, box_columns
from shardprep.formats.shards.read import OUTPUT_FILES, SUFFIXES
from shardprep.formats.sources.listing import repeated_keys
from shardprep.formats.sources.source import ByteReader, Entries, Listing, Problems, entry_dtype

ITEMS_PER_UPDATE = 64  # of the progress
DEFAULT_SHARD_SIZE = 64 << 20
FIRST_BYTES = 512 << 20  # of the first items, which are held until the schema is known
START_S = 0.75  # until a worker process builds its first shard
BYTES_PER_SECOND = 500e6  # hashed, written and read back by one process
ORDERS = {"given": GIVEN, "shuffled": GIVEN_SHUFFLED}


def write_dataset(
    samples: Iterable[Any] | Sized,
    output: str | os.PathLike[str],
    *,
    schema: SchemaLike | None = None,
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
    "label" (an integer of at least -1, or one of the names in ``classes``) belong to the record; all other
    names are columns. The default key is the item's number with eight digits. Tuples and lists have the
    columns "0", "1", ...; a bare value has the column "value". An item counts as at least 1 KiB. Each process
    holds the values of one shard in memory.

    Items with numbers (a sequence, a :class:`.Dataset`, a Flow over these) are written by processes, and must
    be the same each time they are picked. After a kill at any point, the same call keeps the finished shards.
    The bytes do not depend on interruptions or the number of workers. Any other iterable is written in one
    pass in this process, with one shard in memory, and restarts after a kill. The manifest is published last,
    so there is a complete dataset or none. A finished ``output`` with the same schema, options, first 100
    items and, for items with numbers, number of items is only verified. Of items larger than 5 MiB, fewer
    count as the first: those that have 512 MiB together.

    Args:
        samples: An iterable of items.
        output: Folder of the dataset.
        schema: A :class:`.Schema` of all columns, or a mapping of their names to kinds, such as
            ``{"boxes": "float32[*,4]"}``. None derives it from the first 100 items: bytes, text, integers,
            floats and arrays as they are, with ``*`` where sizes differ; None, booleans, lists and dicts as
            "json".
        classes: Names of all classes, if labels are names.
        split: "train", "val" or "test".
        container: "lmdb" or "hdf5".
        shard_size: Bytes of values per shard.
        order: "given" or, for items with numbers, "shuffled" by ``seed``.
        seed: Seed of the order, 0 to 2**64 - 1.
        workers: Number of processes for items with numbers. None is one per usable CPU, or 0 if this process
            alone takes about a second. 0 works in this process.
        progress: Receives the progress; None shows a bar with the rate on a terminal or in a notebook.
        restart: Whether to discard an unfinished output.

    Returns:
        The manifest of the finished dataset.

    Raises:
        BadItem: A DataError; an item differs from the others, or repeats a key.
        UsageError: An argument is invalid; PlanMismatch if ``output`` contains something else.
        OperationError: OutputBusy, NoSpace or WorkerDied.
        OSError: A file cannot be read or written. Errors of making an item are raised unchanged.
    """
    if split not in SPLITS:
        raise UsageError(f"the split is one of {', '.join(SPLITS)}, not {split!r}")
    if order not in ORDERS:
        raise UsageError(f"the order is one of {', '.join(ORDERS)}, not {order!r}")
    options = PlanOptions(container=container, shard_size=shard_size, order=ORDERS[order], seed=seed)
    folder = user_path(output)
    bar = BarProgress("items", visible=sys.stderr.isatty() or in_notebook())
    progress = progress_or_bar(progress or bar)
    refuse_other_shape(folder, split)
    refuse_busy(folder)
    total = operator.length_hint(samples, 0)  # now, because the first items are drawn next
    items = open_items(samples, schema, classes)
    numbered = items.numbered
    if order == "shuffled" and numbered is None:
        raise UsageError(
            "only items with numbers can be shuffled: give a sequence, or a flow over one, or shuffle the flow"
        )
    if numbered is not None and workers is None:  # processes may take longer to start than they save
        size = sum(item.size for item in items.first) / len(items.first)
        seconds = len(numbered) * (items.seconds + size / BYTES_PER_SECOND)
        workers = 0 if seconds * (1 - 1 / usable_cpus()) < START_S else None
    prepared, problems = _prepare(items, folder, split, options), Problems()
    prepared.check_output((), ConvertOptions(restart=restart), problems)
    problems.raise_all()
    if numbered is not None and not prepared.is_finished:
        check_room({folder: prepared.bytes_to_write(prepared.shards)})

    write = partial(_save, items=items, total=total, workers=workers, progress=progress)
    return convert_splits([prepared], write, restart=restart)[0]


def _save(
    prepared: PreparedSplit, items: ItemSource, total: int, workers: int | None, progress: Progress
) -> Manifest:
    with prepared.begin_work() as work_folder:
        if work_folder is not None:
            if items.numbered is not None:
                jobs = _jobs(prepared, items.numbered, items.coder, workers, work_folder)
                runner, shards = JobRunner(workers, progress=progress), prepared.plan.shards
                built = runner.run("save", jobs, work_folder.run, shards)
            else:
                prepared, built = _save_stream(prepared, items, total, work_folder, progress)
            return _finish(work_folder, prepared, items.coder, built)
    manifest, options = prepared.read_finished_manifest(), prepared.listing.options
    if {name: manifest.source.get(name) for name in options} != options:
        raise PlanMismatch(
            "holds a finished dataset of other items; choose another folder, or remove this one",
            path=prepared.output,
        )
    verify_finished(prepared.output, progress)
    return manifest


def _prepare(items: ItemSource, output: Path, split: str, options: PlanOptions) -> PreparedSplit:
    """Return the plan: of all items with numbers, otherwise of the first items as placeholders."""
    if items.numbered is None:
        entries = item_entries(items.first, range(len(items.first)))
    else:  # keys are placeholders, and lengths the mean of the first items
        count = len(items.numbered)
        entries = np.zeros(count, entry_dtype(max(KEY_DIGITS, len(str(count))), 1))
        entries["offset"] = np.arange(count)
        entries["key"] = np.char.zfill(entries["offset"].astype("S"), KEY_DIGITS)
        entries["label"] = -1
        entries["length"] = -(-sum(item.size for item in items.first) // len(items.first))
    digest = hashlib.sha256()  # to recognise the first items by
    for item in items.first:
        for part in (item.key, str(item.label).encode(), item.image, *item.values):
            digest.update(len(part).to_bytes(8, "little") + part)
    listing = Listing(
        split=split,
        layout=LAYOUT,
        entries=entries,
        labels=items.coder.label_space(-1),
        reader=ItemReader(),
        options=items.coder.form.to_json() | {"first": f"sha256:{digest.hexdigest()}"},
        schema=items.coder.schema,
        has_images=items.coder.has_images,
    )
    plan = make_plan(listing, options)
    return PreparedSplit(output, plan, None, plan.shards if items.numbered is not None else ())


def _jobs(
    prepared: PreparedSplit,
    source: NumberedItems,
    coder: ItemCoder,
    workers: int | None,
    work_folder: WorkFolder,
) -> Iterator[ShardJob]:
    """Yield the jobs of all shards of items with numbers.

    The workers pick the items. If these cannot be sent to other processes, this process picks those of
    unfinished shards in one pass.
    """
    shared = None if workers == 0 else source.for_workers()
    if shared is not None and (data := pickle_for_worker(shared)) is not None:
        builder = partial(pick_and_build, data, coder)
        yield from shard_jobs(prepared.plan, prepared.shards, work_folder, builder=builder)
        return
    jobs = list(shard_jobs(prepared.plan, prepared.shards, work_folder))
    numbers = [[] if read_trusted_commit(job) else job.entries["offset"].tolist() for job in jobs]
    missing = list(chain.from_iterable(numbers))
    items = map(coder.encode, missing, source.pick(iter(missing)))
    for job, own in zip(jobs, numbers, strict=True):
        yield with_items(job, list(islice(items, len(own))), own) if own else job


def _save_stream(
    prepared: PreparedSplit, items: ItemSource, total: int, work_folder: WorkFolder, progress: Progress
) -> tuple[PreparedSplit, list[BuiltShard]]:
    """Build shards from an iterator, one by one; return the split with its plan, and the built shards.

    Discards the work of an earlier run, because nothing says which item comes next.
    """
    work_folder.discard(OUTPUT_FILES)
    work_folder.claim(prepared.guard())
    plan, shards, built, done = prepared.plan, list[Unit](), list[BuiltShard](), 0
    with progress.task("save", records=total, size=0):
        for group in _group_by_shard(items, plan.options.shard_size, progress):
            number, first, done = len(shards), done, done + len(group)
            name = f"shard-{number:05d}{SUFFIXES[plan.options.container]}"
            shard = Unit(name, number, first, done, size=0, key_bytes=1)
            ProgressCounters(work_folder.run, [shard])
            (job,) = shard_jobs(replace(plan, shards=(shard,)), [shard], work_folder)
            built.append(build_shard(with_items(job, group, range(first, done))))
            shards.append(shard)
    plan = replace(plan, shards=tuple(shards), order=np.arange(done, dtype=np.uint32))
    return replace(prepared, plan=plan), built


def _group_by_shard(items: ItemSource, shard_size: int, progress: Progress) -> Iterator[list[EncodedItem]]:
    """Yield the items of each shard, which ends before the item that would make it too large."""
    size = done = 0
    group: list[EncodedItem] = []
    for number, item in enumerate(items.rest):
        encoded = items.coder.encode(number, item)
        if group and size + encoded.size > shard_size:
            yield group
            group, done, size = [], done + size, 0
        group.append(encoded)
        size += encoded.size
        if not number % ITEMS_PER_UPDATE:
            progress.at(number, done + size)
    if group:
        yield group


def _finish(
    work_folder: WorkFolder, prepared: PreparedSplit, coder: ItemCoder, built: list[BuiltShard]
) -> Manifest:
    """Check the keys, complete the plan with the widest key and largest label of all items, and finish."""
    pairs = [(rows["row"]["key"], rows["row"]["label"]) for rows in read_shard_rows(work_folder, built)]
    keys, labels = (np.concatenate(each) for each in zip(*pairs, strict=True))
    for key in repeated_keys(keys):
        first, second = sorted(prepared.plan.order[np.flatnonzero(keys == key)[:2]].tolist())
        raise bad_item(second, f"its key is that of item {first}, {key.decode()!r}")
    plan = replace(
        prepared.plan,
        listing=replace(prepared.listing, labels=coder.label_space(int(labels.max()))),
        class_sorted=is_class_sorted(labels),
        key_bytes=min(keys.dtype.itemsize, MAX_KEY_BYTES),
    )
    return finish(work_folder, replace(prepared, plan=plan), built)


KEY_DIGITS = 8
MAX_LABELS = 100_000  # of labels without names
LABEL_DIGITS = 5
MIN_BYTES = 1024  # counted for an item, which takes more memory than its values


class BadItem(DataError):
    """An item does not fit the others, or the schema. ``number`` is its number, from 0."""

    number = 0


class EncodedItem(NamedTuple):
    """An item in its stored form."""

    key: bytes
    label: int
    image: bytes
    values: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return max(MIN_BYTES, len(self.image) + sum(map(len, self.values)))


@dataclass(frozen=True)
class ItemCoder:
    """Encodes items of one form. Picklable.

    If ``is_inferred``, the ``schema`` was derived from items, and numbers must have exactly its types.
    ``classes`` are the names of the labels 0, 1, ..., empty for labels without names.
    """

    form: ItemForm
    schema: Schema
    is_inferred: bool
    classes: tuple[str, ...] = ()

    @property
    def has_images(self) -> bool:
        return "image" in self.form.own_names

    def encode(self, number: int, item: Any) -> EncodedItem:
        """Encode the item with this number. Raises BadItem, which names the number and the column."""
        try:
            parts = self.form.parts(item)
            values = {name: self._encode_part(name, parts[name], to) for name, to in self._encoders.items()}
        except BadValue as error:
            raise bad_item(number, error.message) from error
        key = values.pop("key", None) or b"%0*d" % (KEY_DIGITS, number)
        label, image = values.pop("label", UNLABELLED), values.pop("image", b"")
        return EncodedItem(key, label, image, tuple(values.values()))

    def _encode_part(self, name: str, value: Any, encode: Callable[[Any], Any]) -> Any:
        try:
            refuse_masked(value)
            return encode(value)
        except BadValue as error:
            is_inferred = self.is_inferred and name in self.form.columns
            advice = "; schema= can name another kind" if is_inferred else ""
            raise BadValue(f"{name}: {error.message}{advice}") from error

    @cached_property
    def _encoders(self) -> dict[str, Callable[[Any], Any]]:
        own: dict[str, Callable[[Any], Any]]
        own = {"key": encode_key, "label": self._encode_label, "image": encode_image}
        encoders = {name: own[name] for name in own if name in self.form.own_names}
        for field in self.schema:
            encoders[field.name] = partial(encode_exactly, field) if self.is_inferred else field.codec.encode
        return encoders

    def _encode_label(self, value: Any) -> int:
        """Return the stored label, which is the position of its name among the sorted names."""
        if isinstance(value, str) != self.form.is_named:
            raise bad_value(value, "the name of a class" if self.form.is_named else "a label")
        if self.classes:
            return class_number(value, self._place_of, least=UNLABELLED)
        try:
            label = UNLABELLED - 1 if isinstance(value, bool) else operator.index(value)
        except TypeError as error:
            raise bad_value(value, "a label, or with classes= the name of one") from error
        if not UNLABELLED <= label < MAX_LABELS:
            raise bad_value(value, f"a label, which is -1 to {MAX_LABELS - 1} (without classes=)")
        return label

    @cached_property
    def _place_of(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(sorted(self.classes))}

    def label_space(self, largest: int) -> LabelSpace:
        """Return the label space of a dataset with this largest label."""
        numbers = (f"{label:0{LABEL_DIGITS}d}" for label in range(largest + 1))
        return LabelSpace.of(self.classes or numbers)


def encode_key(value: Any) -> bytes:
    """Encode a key. Raises BadValue for any other value."""
    data = TextCodec().encode(value)
    if not data or len(data) > MAX_KEY_BYTES or b"\0" in data:
        raise bad_value(value, f"a key, which has 1 to {MAX_KEY_BYTES} bytes and no NUL")
    return data


def encode_image(value: Any) -> bytes:
    """Return an encoded image's bytes. Raises BadValue for any other value."""
    try:
        return ImageCodec().encode(value)
    except BadValue as error:
        advice = "an image must be the bytes of an encoded file: encode pixels, or give them another name"
        raise BadValue(f"{error.message} ({advice})") from error


@contextmanager
def name_item_in_errors(number: int | None) -> Iterator[None]:
    """Convert BadValue to BadItem with this number, or, if it is None, with the error's key as number."""
    try:
        yield
    except BadValue as error:
        raise bad_item(int(error.key or 0) if number is None else number, error.message) from error


def bad_item(number: int, message: str) -> BadItem:
    error = BadItem(f"item {number}: {message}")
    error.number = number
    return error


class NumberedItems(ABC):
    """Items with the numbers 0 to ``len`` - 1, each the same every time it is picked."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of items."""

    @abstractmethod
    def pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield the items with these numbers, in this order."""

    def for_workers(self) -> NumberedItems | None:
        """Return these items for worker processes; None if only this process can pick them."""
        return self


@dataclass(frozen=True)
class SequenceItems(NumberedItems):
    """The elements of a ``sequence``, for which ``sequence[n]`` is the n-th."""

    sequence: Any

    def __len__(self) -> int:
        return len(self.sequence)

    def pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        return map(self.item, numbers)

    def item(self, number: int) -> Any:
        """Return an item. Converts StopIteration to RuntimeError, as it would silently end the items."""
        try:
            return self.sequence[number]
        except StopIteration as error:
            name = type(self.sequence).__name__
            raise RuntimeError(f"item {number} of the {name} raised StopIteration") from error

    @classmethod
    def of(cls, items: Any) -> Self | None:
        """Return the elements of an object with ``[]`` and ``len``; None for any other iterable."""
        kind = type(items).__name__
        if isinstance(items, str | bytes | bytearray | Mapping):
            raise UsageError(f"an object of type {kind} is one item, not several; give a list of items")
        if hasattr(items, "iloc"):  # of pandas, whose [] takes labels
            if items.ndim > 1:
                raise UsageError(f"a {kind} is a table: give its rows, .to_dict('records') or .to_numpy()")
            items = items.array
        if not isinstance(items, Iterator) and hasattr(items, "__getitem__"):
            with suppress(TypeError):  # an array without dimensions has no len
                len(items)
                return cls(items)
        if not isinstance(items, Iterable):
            raise UsageError(
                f"an object of type {kind} has no items: give a list, or a function to Flow.from_callable"
            )
        return None


SchemaLike = Schema | Mapping[str, str] | Sequence[Field]


@dataclass(frozen=True)
class ItemSource:
    """All items, by number or as the iterator ``rest``; their coder; and the ``first`` items, encoded.

    ``seconds`` is the time it took to make and encode each of the first items.
    """

    coder: ItemCoder
    first: tuple[EncodedItem, ...]
    numbered: NumberedItems | None
    rest: Iterator[Any]
    seconds: float


def open_items(
    samples: Iterable[Any] | Sized, schema: SchemaLike | None, classes: Sequence[str] | None
) -> ItemSource:
    """Encode the first items. Raises UsageError if there are none, or the schema or classes do not fit."""
    if isinstance(samples, Dataset):
        boxes = [Field(name, BOX_COLUMNS[name]) for name in box_columns(samples.manifest)]
        schema = [*samples.schema, *boxes] if schema is None else schema
        classes = samples.classes if classes is None and samples.label_space == SPACES[0] else classes
    numbered = samples if isinstance(samples, NumberedItems) else None
    if numbered is None:  # a flow knows whether its items have numbers
        numbered = samples.by_number() if hasattr(samples, "by_number") else SequenceItems.of(samples)
    if numbered is None:
        drawn: Iterator[Any] = iter(samples)  # type: ignore[arg-type]
    else:
        drawn = numbered.pick(range(min(FIRST_ITEMS, len(numbered))))
    form: ItemForm | None = None
    items, rows, size, began = list[Any](), list[Mapping[str, Any]](), 0, 0.0
    for number, item in enumerate(islice(drawn, FIRST_ITEMS)):
        began = began or perf_counter()  # without the first item, which may open shared resources
        with name_item_in_errors(number):
            form = form or ItemForm.of(item)
            rows.append(form.parts(item))
        items.append(item)
        size += sum(len(v) if isinstance(v, bytes) else getattr(v, "nbytes", 0) for v in rows[-1].values())
        if size >= FIRST_BYTES:
            break
    if form is None:
        raise UsageError("there are no items to save")
    if not form.columns and "image" not in form.own_names:
        raise UsageError("the items have neither an image nor a column, so there is nothing to save")
    form, names = _resolve_classes(form, rows[0], classes)
    if schema is None:
        with name_item_in_errors(None):
            columns = infer_schema(rows, form.columns)
    else:
        columns, own = split_schema(schema)
        if differing := sorted(set(form.names) ^ {*columns.names, *(own or form.own_names)}):
            raise UsageError(
                f"the schema and the items differ in {', '.join(differing)}: the items are {form.description}"
            )
        columns = Schema(columns[name] for name in form.columns)
    coder = ItemCoder(form, columns, is_inferred=schema is None, classes=names)
    first = tuple(coder.encode(number, item) for number, item in enumerate(items))
    rest = chain(items, drawn) if numbered is None else drawn
    return ItemSource(coder, first, numbered, rest, (perf_counter() - began) / len(first))


def _resolve_classes(
    form: ItemForm, row: Mapping[str, Any], classes: Sequence[str] | None
) -> tuple[ItemForm, tuple[str, ...]]:
    """Return the form with the kind of its labels, and the names of the classes."""
    names = () if classes is None else tuple(classes)
    if isinstance(classes, str) or not all(map(is_text, names)) or len(set(names)) < len(names):
        raise UsageError("classes must be a list of unique names")
    is_named = "label" in form.own_names and isinstance(row["label"], str)
    if names and "label" not in form.own_names:
        raise UsageError("classes need items with a label: dicts with the name 'label'")
    if is_named and not names:
        raise UsageError("the labels are names; give classes=, the names of all classes")
    in_order = () if list(names) == sorted(names) else names
    if in_order and not is_named:
        raise UsageError("a Loader numbers classes by sorted name, unlike classes=: give the names as labels")
    return replace(form, is_named=is_named, classes=in_order), names


@dataclass(frozen=True)
class ItemReader(ByteReader):
    """A reader of encoded items. An entry's ``mtime_ns`` is its index in ``items``, its offset its number."""

    items: tuple[EncodedItem, ...] = ()

    def read(self, entry: np.void) -> bytes:
        return self.items[int(entry["mtime_ns"])].image

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        return self.items[int(entry["mtime_ns"])].values

    def location_of(self, entry: np.void) -> str:
        return f"item {entry['offset']}"

    def open(self) -> AbstractContextManager[ItemReader]:
        return nullcontext(self)


def with_items(job: ShardJob, items: Sequence[EncodedItem], numbers: Sequence[int]) -> ShardJob:
    """Return the job with these items, and their numbers, in place of its placeholders."""
    entries = item_entries(items, numbers)
    size = sum(len(item.image) + sum(map(len, item.values)) for item in items)
    shard = replace(job.shard, size=size, key_bytes=entries.dtype["key"].itemsize)
    return replace(job, entries=entries, shard=shard, reader=ItemReader(tuple(items)))


def item_entries(items: Sequence[EncodedItem], numbers: Sequence[int]) -> Entries:
    entries = np.zeros(len(items), entry_dtype(max(len(item.key) for item in items), 1))
    entries["key"] = [item.key for item in items]
    entries["label"] = [item.label for item in items]
    entries["length"] = [item.size for item in items]
    entries["offset"] = numbers
    entries["mtime_ns"] = np.arange(len(items))
    return entries


def pick_and_build(source: bytes, coder: ItemCoder, job: ShardJob) -> BuiltShard:
    """Build a shard, unless it is finished, from items that the worker picks from the packed ``source``."""
    if finished := read_trusted_commit(job):
        return finished
    numbers: list[int] = job.entries["offset"].tolist()
    picked = _unpickle_items(source).pick(iter(numbers))
    items = [coder.encode(number, item) for number, item in zip(numbers, picked, strict=True)]
    return build_shard(with_items(job, items, numbers))


_unpickle_items = lru_cache(maxsize=1)(ForkingPickler.loads)  # shared by all shards of a worker
