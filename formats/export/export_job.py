"""The job that builds one unit of an export, on any executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from shardprep.formats.columns.column_record import ColumnRecord
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import Rows
from shardprep.formats.conversion.building.plan import PlannedShard
from shardprep.formats.conversion.building.progress_counters import COUNTERS_NAME, ShardCounter
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.errors import DataError
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json
from shardprep.formats.system.atomic_write import publish_bytes

from .export_format import ExportFormat, Places
from .export_record import ExportRecord


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset with its boxes, which a process opens once for all its jobs."""

    dataset: Dataset
    boxes: Rows | None

    def boxes_of(self, number: int) -> Rows | None:
        """Return the boxes of a record, None if the dataset has none."""
        if self.boxes is None:
            return None
        first, last = np.searchsorted(self.boxes["record"], [number, number + 1])
        return self.boxes[first:last]


@lru_cache(maxsize=1)
def opened(path: Path, root: str) -> OpenedDataset:
    """Return the dataset with that root, kept open. Raises DataError if another one is there now."""
    dataset = Dataset(path)
    if dataset.manifest.root != root:
        raise DataError("was replaced while it was exported; export it again", path=path)
    return OpenedDataset(dataset, dataset.boxes)


@dataclass(frozen=True)
class ExportJob:
    """All that a worker needs to build a unit. Picklable.

    ``shard`` has the unit's name and records; ``names`` are the format's names of these. ``plan`` is the
    SHA-256 of what decides the bytes, and ``known`` the unit as it was finished earlier.
    """

    dataset: Path
    root: str
    format: ExportFormat
    places: Places
    shard: PlannedShard
    names: tuple[str, ...]
    plan: str
    known: FileEntry | None = None
    decodes: bool = False

    @property
    def output(self) -> Path:
        return self.places.output

    def build(self) -> FileEntry:
        """Build and publish the unit, unless it is finished. Raises DataError, UsageError, OSError."""
        finished = self.known or self._committed()
        if finished is not None and self.format.is_intact(finished, self.names, self.output):
            return finished
        count = self.shard.last - self.shard.first
        unit = self.format.build(self.shard.name, self._records(), count, self.places)
        value = {"plan": self.plan, "unit": unit.to_json()}
        publish_bytes(self._commit, canonical_json(value), self.places.run)
        return unit

    def key_at(self, place: int) -> str:
        """Return the key of the record at that place, or of the last one."""
        dataset = opened(self.dataset, self.root).dataset
        key: bytes = dataset.index["key"][min(self.shard.first + place, self.shard.last - 1)]
        return key.decode()

    def decode(self, place: int) -> None:
        """Do nothing: an export decodes no image."""

    def crashed(self, place: int, signal: str) -> Self:
        """Return the job itself."""
        return self

    @property
    def _commit(self) -> Path:
        return self.places.work / (self.shard.name + ".commit")

    def _committed(self) -> FileEntry | None:
        try:
            commit = parse_canonical_json(self._commit.read_bytes())
            return FileEntry(**commit["unit"]) if commit["plan"] == self.plan else None
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _records(self) -> Iterator[ExportRecord]:
        source = opened(self.dataset, self.root)
        counter = ShardCounter(self.places.run / COUNTERS_NAME, self.shard.number)
        with closing(counter):
            for done, name in enumerate(self.names):
                counter.set(done)
                number = self.shard.first + done
                record = source.dataset[number]
                columns = record.columns if isinstance(record, ColumnRecord) else {}
                row, boxes = source.dataset.index[number], source.boxes_of(number)
                yield ExportRecord(name, *record, row, boxes, columns)
            counter.set(len(self.names))
