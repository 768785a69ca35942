"""The work of a loader's workers: read a record from its shard, transform it, write it to its row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.columns.column_entry import ColumnEntry
from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.open_columns import ChainedColumns, PartFiles
from shardprep.formats.containers.blocks import Block, blocks_of
from shardprep.formats.containers.container import Indexed, Room, ShardReader
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.registry import container
from shardprep.formats.containers.shard_cache import OpenShards
from shardprep.formats.dataset.record_set import IndexRows, RecordSet
from shardprep.formats.errors import BadImage, BadTarget, CorruptRecord, ShardDamaged, UsageError
from shardprep.formats.images.kinds.image_info import ImageFlag
from shardprep.formats.processes.one_thread import use_one_thread
from shardprep.formats.records.record import CropReadyRecord, Record
from shardprep.loaders.buffers.memory import keep_freed_memory
from shardprep.loaders.buffers.slots import INPUTS, Arrays
from shardprep.loaders.engine.protocol.task import Clock, Fill, Items, Skipped
from shardprep.loaders.engine.protocol.written_rows import ROW_COLUMNS, RowWriter
from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.order.rng import RecordRandom
from shardprep.loaders.transforms.columns import AsColumns
from shardprep.loaders.transforms.contract import Transform, fill_rows, outputs_of
from shardprep.loaders.transforms.decode import decoding_seconds

TIMED_OF = 8  # of so many reads of encoded images, one is timed
STAGES = ("read", "decode", "augment")  # decode is a transform's time in decode_rgb, augment the rest


def item_dtype(key_bytes: int) -> np.dtype[np.void]:
    """The dtype of an :class:`Item`, with a key of at most ``key_bytes`` bytes."""
    place = [("number", "<i8"), ("draw", "<i8"), ("shard", "<u4"), ("ordinal", "<u4"), ("crop_ready", "?")]
    indexed = [("key", f"S{key_bytes}"), ("label", "<i4"), ("crc32c", "<u4")]
    return np.dtype([("epoch", "<u8"), *place, *ROW_COLUMNS, *indexed])


class Item(NamedTuple):
    """One record to deliver: its number in the dataset, its place and kind, and its columns in the index.

    ``draw`` is the number of its random values. Between them are the ROW_COLUMNS of its row of the batch.
    """

    epoch: int
    number: int
    draw: int
    shard: int
    ordinal: int
    crop_ready: bool
    row: int
    rows: int
    form_at: int
    form_size: int
    key: bytes
    label: int
    crc32c: int

    @property
    def indexed(self) -> Indexed:
        return self[-3:]


def items_of(index: IndexRows, numbers: Records, epoch: int, *, draws: Records | None = None) -> Items:
    """Return the work items of these records, with the random values of ``draws``, or of their numbers."""
    items = np.zeros(len(numbers), item_dtype(index.dtype["key"].itemsize))
    items["epoch"], items["number"] = epoch, numbers
    items["draw"] = numbers if draws is None else draws
    rows = index[numbers]
    for column in ("shard", "ordinal", "key", "label", "crc32c"):
        items[column] = rows[column]
    items["crop_ready"] = rows["flags"] & ImageFlag.CROP_READY != 0
    return items


def blocks_read(dataset: RecordSet, work: ShardWork) -> list[tuple[Block, ...]]:
    """Return the blocks of the images and of each column that has shards, as far as ``work`` reads them."""
    of_images = [dataset.blocks] if work.with_image else []
    if dataset.in_place:  # its blocks are not those of columns
        return of_images
    return of_images + [
        _blocks_of_column(dataset, work, at) for at, each in enumerate(work.columns) if each.shards
    ]


def _blocks_of_column(dataset: RecordSet, work: ShardWork, column: int) -> tuple[Block, ...]:
    pairs = zip(dataset.parts, work.parts, strict=True)
    placed = (dataset.placed(part, blocks_of(files.columns[column].shards)) for part, files in pairs)
    return tuple(block for blocks in placed for block in blocks)


def files_read(work: ShardWork) -> list[tuple[FileEntry, ...]]:
    """Return the files of the images and of each column that has shards, by shard, as ``work`` reads them.

    They are those of one dataset: a collection has no remote parts.
    """
    (part,) = work.parts
    of_images = [part.shards] if work.with_image else []
    return of_images + [column.shards for column in work.columns if column.shards]


@dataclass(frozen=True)
class ShardWork:
    """A loader's work: the place of its shards and what to do with each record. Picklable.

    Keys have at most ``key_bytes`` bytes. ``transform=None`` delivers each record's encoded image.
    ``label_map[label]`` is the label that a transform is given. With ``skip_bad`` a damaged record, or one
    that does not decode, is skipped; a shard that cannot be opened is still an error. ``one_thread`` limits
    OpenCV and PyTorch to one thread, for work in several processes. A transform is given the columns of the
    ``parts``, and without ``with_image`` no image.
    """

    parts: tuple[PartFiles, ...]
    key_bytes: int
    transform: Transform | None
    label_map: tuple[int, ...]
    seed: int
    skip_bad: bool
    one_thread: bool
    with_image: bool = True

    @property
    def columns(self) -> tuple[ColumnEntry, ...]:
        """The columns of the first part; the others have the same."""
        return self.parts[0].columns

    @property
    def item_dtype(self) -> np.dtype[Any]:
        return item_dtype(self.key_bytes)

    @property
    def stages(self) -> tuple[str, ...]:
        return STAGES

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        for name in {part.container for part in self.parts}:
            container(name)  # importing its library takes up to 0.1 s: do it before the first batch
        if self.one_thread:
            use_one_thread()
            keep_freed_memory()
        folders = ((part.folder, part.container, part.shards) for part in self.parts)
        with closing(OpenShards.of_parts(folders)) as shards, closing(ChainedColumns(self.parts)) as columns:
            yield _ShardWorkspace(self, shards, columns, clock).fill


class _ShardWorkspace:
    """The open shards of a worker; fills rows in one thread."""

    def __init__(self, work: ShardWork, shards: OpenShards, columns: ChainedColumns, clock: Clock) -> None:
        self._work = work
        self._shards = shards
        self._columns = columns
        self._clock = clock
        self._took, self._rows = [0.0] * len(STAGES), 0
        self._random = RecordRandom(work.seed)
        self._transform = work.transform or AsColumns(())
        self._outputs = outputs_of(self._transform)

    def fill(self, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
        self._took, self._rows = [0.0] * len(STAGES), len(items)
        self._written = RowWriter(items, arrays.pop(INPUTS, None))
        try:
            yield from self._outcomes(items, arrays, room)
        finally:
            self._clock += (
                self._took
            )  # once for all rows: adding to an array takes longer than reading a clock

    def _outcomes(self, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
        for row, item in enumerate(map(Item._make, items.tolist())):
            reader = self._shards[item.shard] if self._work.with_image else None
            try:
                outcome = self._outcome(reader, item, arrays, row, room)
            except (BadImage, BadTarget, CorruptRecord, ShardDamaged) as error:
                if not self._work.skip_bad:
                    raise
                outcome = Skipped(str(error))
            yield outcome

    def _outcome(
        self, reader: ShardReader | None, item: Item, arrays: Arrays, row: int, room: Room
    ) -> object:
        if self._work.transform is None and reader is not None:
            return self._encoded(reader, item, row, room)
        began = perf_counter()
        record = self._read(reader, item)
        if isinstance(self._transform, AsColumns):  # which reads
            values = self._transform.write(record, arrays, row)
            self._took[0] += perf_counter() - began
            return values
        read, decoded = perf_counter(), decoding_seconds()
        outcome = self._transformed(self._transform, record, item, arrays, row)
        decoding = decoding_seconds() - decoded
        self._took[0] += read - began
        self._took[1] += decoding
        self._took[2] += perf_counter() - read - decoding
        return outcome

    def _encoded(self, reader: ShardReader, item: Item, row: int, room: Room) -> object:
        """Read an image; one of TIMED_OF is timed for all, because two clock readings take 1 % of a read."""
        if row % TIMED_OF:
            return reader.image_in(item.ordinal, room, indexed=item.indexed)
        began = perf_counter()
        image = reader.image_in(item.ordinal, room, indexed=item.indexed)
        self._took[0] += (perf_counter() - began) * min(TIMED_OF, self._rows - row)
        return image

    def _read(self, reader: ShardReader | None, item: Item) -> Record:
        record = self._image(reader, item)
        if not len(self._columns):
            return record
        return self._columns.of(record, RecordPlace(item.number, item.shard, item.ordinal, item.key))

    def _image(self, reader: ShardReader | None, item: Item) -> Record:
        """Return the record without columns; with no image if none is wanted."""
        label = self._work.label_map[item.label]
        if reader is None:
            return Record(item.key.decode(), label, b"")
        record = reader.read(item.ordinal, indexed=item.indexed)
        kind = CropReadyRecord if item.crop_ready else Record
        return kind(record.key, label, record.image)

    def _transformed(
        self, transform: Transform, record: Record, item: Item, arrays: Arrays, row: int
    ) -> object:
        rng = self._random(item.epoch, item.draw)
        if self._outputs is not None:
            fill_rows(transform, record, rng, tuple(arrays[spec.name][row, ...] for spec in self._outputs))
            return None
        made = transform(record, rng)
        if made is None:
            raise UsageError("the transform returned None; it must return an array", key=record.key)
        return None if self._written.write(made, item.row) else made
