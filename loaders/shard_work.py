"""What a loader's workers do: read a record from its shard, transform it, write it into its row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..formats.errors import BadImage, CorruptRecord, ShardDamaged, UsageError
from ..formats.index import Rows
from ..formats.manifest import FileEntry
from ..formats.open_shards import OpenShards
from ..formats.opencv import cv2
from ..formats.record import Record
from ..formats.shard import Room, ShardReader, container
from .decoding import decoding_seconds
from .heap import keep_freed_memory
from .order import Records
from .rng import RecordRandom
from .slots import Arrays
from .transforms import Transform, fill_rows, outputs_of
from .work import Clock, Fill, Items, Skipped

TIMED_OF = 8
STAGES = ("read", "decode", "augment")  # decode is what decode_rgb takes of a transform, augment the rest

ITEM = np.dtype(
    [("epoch", "<u8"), ("number", "<i8"), ("shard", "<u4"), ("ordinal", "<u4"), ("crc32c", "<u4")]
)


class Item(NamedTuple):
    """One record to deliver: its number in the dataset, its place, and the checksum that it has there."""

    epoch: int
    number: int
    shard: int
    ordinal: int
    crc32c: int


def items_of(index: Rows, numbers: Records, epoch: int) -> Items:
    """The work items of these records."""
    items = np.empty(len(numbers), ITEM)
    items["epoch"], items["number"] = epoch, numbers
    rows = index[numbers]
    for column in ("shard", "ordinal", "crc32c"):
        items[column] = rows[column]
    return items


@dataclass(frozen=True)
class ShardWork:
    """Picklable; knows where the shards are and what to do with a record.

    ``transform=None`` delivers each record's bytes. ``label_map[label]`` is the label that a
    transform sees. With ``skip_bad`` a damaged record, or one that does not decode, is skipped; a
    shard that cannot be opened is an error all the same. ``one_thread`` keeps OpenCV to one, for who
    works in several processes.
    """

    folder: Path
    container: str
    shards: tuple[FileEntry, ...]
    transform: Transform | None
    label_map: tuple[int, ...]
    seed: int
    skip_bad: bool
    one_thread: bool

    @property
    def item_dtype(self) -> np.dtype[Any]:
        return ITEM

    @property
    def stages(self) -> tuple[str, ...]:
        return STAGES

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        container(self.container)  # to import its library takes up to 0.1 s, better here than in a batch
        if self.one_thread:
            cv2.setNumThreads(0)
            keep_freed_memory()
        with closing(OpenShards(self.folder, self.container, self.shards)) as shards:
            yield _Bench(self, shards, clock).fill


class _Bench:
    """Fills rows; one thread uses it."""

    def __init__(self, work: ShardWork, shards: OpenShards, clock: Clock) -> None:
        self._work = work
        self._shards = shards
        self._clock = clock
        self._took, self._rows = [0.0] * len(STAGES), 0
        self._random = RecordRandom(work.seed)
        self._outputs = outputs_of(work.transform) if work.transform is not None else None

    def fill(self, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
        self._took, self._rows = [0.0] * len(STAGES), len(items)
        try:
            yield from self._outcomes(items, arrays, room)
        finally:
            self._clock += self._took  # once for all rows: to add to an array costs more than to read a clock

    def _outcomes(self, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
        for row, item in enumerate(map(Item._make, items.tolist())):
            reader = self._shards[item.shard]
            try:
                outcome = self._outcome(reader, item, arrays, row, room)
            except (BadImage, CorruptRecord, ShardDamaged) as error:
                if not self._work.skip_bad:
                    raise
                outcome = Skipped(str(error))
            yield outcome

    def _outcome(self, reader: ShardReader, item: Item, arrays: Arrays, row: int, room: Room) -> object:
        transform = self._work.transform
        if transform is None:
            return self._encoded(reader, item, row, room)
        began = perf_counter()
        record = self._read(reader, item)
        read, decoded = perf_counter(), decoding_seconds()
        outcome = self._transformed(transform, record, item, arrays, row)
        decoding = decoding_seconds() - decoded
        self._took[0] += read - began
        self._took[1] += decoding
        self._took[2] += perf_counter() - read - decoding
        return outcome

    def _encoded(self, reader: ShardReader, item: Item, row: int, room: Room) -> object:
        """Of every few that are read one is timed, and stands for them: two clocks are 1 % of reading one."""
        if row % TIMED_OF:
            return reader.image_in(item.ordinal, room, crc32c=item.crc32c)
        began = perf_counter()
        image = reader.image_in(item.ordinal, room, crc32c=item.crc32c)
        self._took[0] += (perf_counter() - began) * min(TIMED_OF, self._rows - row)
        return image

    def _read(self, reader: ShardReader, item: Item) -> Record:
        record = reader.read(item.ordinal, crc32c=item.crc32c)
        return record._replace(label=self._work.label_map[record.label])

    def _transformed(
        self, transform: Transform, record: Record, item: Item, arrays: Arrays, row: int
    ) -> object:
        rng = self._random(item.epoch, item.number)
        if self._outputs is not None:
            fill_rows(transform, record, rng, tuple(arrays[spec.name][row, ...] for spec in self._outputs))
            return None
        made = transform(record, rng)
        if made is None:
            raise UsageError("the transform returned None; let it return an array", key=record.key)
        return made
