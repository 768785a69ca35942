"""What an export of one dataset is to make, and what is known of it on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.container import Extent
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import Rows
from shardprep.formats.conversion.building.plan import PlannedShard, differences, spans
from shardprep.formats.conversion.building.work_folder import (
    WorkFolder,
    finished_shards,
    refuse_busy,
    refuse_other_plan,
)
from shardprep.formats.conversion.preflight import check_output
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME, Manifest
from shardprep.formats.errors import DataError, PlanMismatch
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json, sha256_of

from .export_format import Exportable, ExportFormat, Places
from .export_job import ExportJob
from .export_record import kind_of

MARKER = ".export.json"
"""The file that is published last. Readers of images, tars and tables pass over hidden files."""


@dataclass(frozen=True)
class Marker:
    """What a finished export says of itself: its plan, its units and the files about all of them."""

    plan: Mapping[str, Any]
    classes: tuple[str, ...]
    units: tuple[FileEntry, ...]
    index: tuple[FileEntry, ...]

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        return canonical_json({"format": "shardprep-export"} | asdict(self))

    @classmethod
    def read(cls, output: Path) -> Marker | None:
        """Return the marker in a folder, None if there is none. Raises DataError, OSError."""
        path = output / MARKER
        try:
            value = parse_canonical_json(path.read_bytes())
            units, index = ([FileEntry(**each) for each in value[name]] for name in ("units", "index"))
            return cls(dict(value["plan"]), tuple(value["classes"]), tuple(units), tuple(index))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise DataError("is not what an export wrote; export to another folder", path=path) from error


@dataclass(frozen=True)
class PlannedExport:
    """The export of one dataset into ``output``: its format, its units and what decides their bytes."""

    dataset: Path
    output: Path
    manifest: Manifest
    index: Rows
    format: ExportFormat
    units: tuple[PlannedShard, ...]
    shard_size: int

    @classmethod
    def of(cls, path: Path, output: Path, kind: type[ExportFormat], shard_size: int) -> PlannedExport:
        """Plan an export. Raises UsageError, DataError and OSError before anything is written."""
        with Dataset(path) as dataset:
            source = exportable(dataset)
            chosen = kind(source, dataset.index)
            lengths = payload(dataset)
            bounds = list(spans(lengths, shard_size))
            units = [
                PlannedShard(
                    name=chosen.unit_name(number, len(bounds)),
                    number=number,
                    first=first,
                    last=last,
                    extent=Extent(last - first, int(lengths[first:last].sum()), 0),
                )
                for number, (first, last) in enumerate(bounds)
            ]
            return cls(path, output, dataset.manifest, dataset.index, chosen, tuple(units), shard_size)

    @property
    def guard(self) -> dict[str, Any]:
        """What must be equal when an export is resumed, by names that users know."""
        return {
            "to": self.format.name,
            "shard_size": self.shard_size,
            "writer": self.format.writer,
            "dataset": self.manifest.root,
        }

    def marker(self) -> Marker | None:
        """Return the marker of a finished export. Raises PlanMismatch if it is of another one; DataError."""
        found = Marker.read(self.output)
        if found is not None and (differing := differences(found.plan, self.guard)):
            raise PlanMismatch(
                f"holds a finished export: {differing}; choose another folder, or remove this one",
                path=self.output,
            )
        return found

    def check(self) -> None:
        """Raise UsageError for an output that is not this export's, OutputBusy, and OSError."""
        refuse_busy(self.output)
        if self.marker() is None:
            check_output(self.output, [self.dataset.resolve()], work="an export")
            refuse_other_plan(self.output, self.guard, work="export")

    def bytes_to_write(self) -> int:
        """Return about how many bytes are still to be written."""
        if self.marker() is not None:
            return 0
        done = finished_shards(self.output)
        left = [unit.extent for unit in self.units if unit.name not in done]
        beside = self.format.bytes_beside()
        return sum(extent.payload_bytes + extent.records * beside for extent in left)

    def names(self, unit: PlannedShard) -> tuple[str, ...]:
        """Return the format's names of a unit's records."""
        return tuple(self.format.names(self.index[unit.first : unit.last]))

    def jobs(self, work_folder: WorkFolder, known: Mapping[str, FileEntry]) -> Iterator[ExportJob]:
        """Yield the jobs of all units; ``known`` are units that were finished earlier, by name."""
        plan = sha256_of(self.guard)
        for unit in self.units:
            yield ExportJob(
                dataset=self.dataset.absolute(),
                root=self.manifest.root,
                format=self.format,
                places=places(work_folder),
                shard=unit,
                names=self.names(unit),
                plan=plan,
                known=known.get(unit.name),
            )


def places(work_folder: WorkFolder) -> Places:
    """Return where the jobs of a run write."""
    output = work_folder.output.absolute()  # a job may run in another process, which has another folder
    return Places(output, output / WORK_FOLDER_NAME, work_folder.run.absolute())


def exportable(dataset: Dataset) -> Exportable:
    """Return what formats need to know of a dataset."""
    flags = np.unique(dataset.index["flags"]).tolist()
    return Exportable(
        path=dataset.path,
        split=dataset.manifest.split,
        labels=dataset.manifest.labels,
        schema=dataset.schema,
        kinds=frozenset(map(kind_of, flags)),
        has_images=dataset.manifest.has_images,
        has_labels=bool((dataset.index["label"] >= 0).any()),
        has_boxes=dataset.boxes is not None,
    )


def payload(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Return the bytes of each record's image and columns."""
    lengths = dataset.index["length"].astype(np.int64)
    for field in dataset.schema:
        lengths += dataset.columns[field.name].lengths()
    return lengths
