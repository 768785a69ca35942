"""The export of a dataset, or of a folder of splits, to the format of another loader."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.plan import DEFAULT_SHARD_SIZE, shard_ranges
from shardprep.formats.conversion.prepare import check_output, check_room
from shardprep.formats.errors import DataError, PlanMismatch, UsageError
from shardprep.formats.exports.folders import Folders
from shardprep.formats.exports.format import ExportFormat, ExportRecord, ExportSource, JobFolders
from shardprep.formats.exports.mds import MDS
from shardprep.formats.exports.parquet import Croissant, Parquet
from shardprep.formats.exports.tfrecord import TFRecord
from shardprep.formats.exports.webdataset import WebDatasetTars
from shardprep.formats.runtime.files import publish_bytes, read_small_file
from shardprep.formats.runtime.jobs import Job, JobRunner, Unit, counted_range
from shardprep.formats.runtime.json_record import canonical_json, parse_as, parse_canonical_json
from shardprep.formats.runtime.processes import usable_cpus
from shardprep.formats.runtime.progress import Progress, check_int, progress_or_bar
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.runtime.work_folder import (
    WorkFolder,
    add_resume_note,
    describe_differences,
    describe_finished,
    finished_shards,
    refuse_busy,
    refuse_other_plan,
    remove_leftover,
)
from shardprep.formats.shards.dataset import Dataset, open_with_root, splits_of
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.read import FileEntry, Rows

FORMATS: dict[str, type[ExportFormat]] = {
    kind.name: kind for kind in (WebDatasetTars, TFRecord, MDS, Parquet, Croissant, Folders)
}


@dataclass(frozen=True)
class Exported:
    """One exported split.

    Attributes:
        path: Its folder.
        to: The format.
        split: The dataset's split.
        records: Number of its records.
        root: The dataset's root.
        files: The units with their sizes and SHA-256 (for ``folders``, groups of images), then the files
            that describe them all.
        already_complete: Whether an earlier call had finished the export, so that files were only compared.
        has_images: False if no record has an image.
    """

    path: Path
    to: str
    split: str
    records: int
    root: str
    files: tuple[FileEntry, ...]
    already_complete: bool
    has_images: bool = True


def export(
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str,
    shard_size: int = DEFAULT_SHARD_SIZE,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Exported]:
    """Export a dataset to another loader's format. After a kill at any point, the same call finishes it.

    The result has the same bytes for any number of workers and interruptions. Images are exported unchanged,
    each checked against its checksum, in the order of the dataset. The files of a finished export are
    compared with their checksums, and damaged ones are rebuilt.

    Args:
        dataset: Folder of a dataset, or a folder of splits, each exported into ``output/<split>``.
        output: A new or empty folder, or one that the same call began or finished.
        to: "webdataset", "tfrecord", "mds", "parquet" or "croissant" (these two need pyarrow), or "folders".
        shard_size: Bytes of images and columns per file, at most 4 GiB.
        workers: Number of processes; None is one per usable CPU, 0 works in this process.
        executor: An executor of :mod:`concurrent.futures` that runs the jobs instead, and is left open. At
            most ``workers`` jobs are submitted at a time; None is 256.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The exported splits.

    Raises:
        UsageError: The format cannot hold a column, which is named, or the output holds something else;
            PlanMismatch if that is another export.
        DataError: The dataset is damaged.
        OperationError: OutputBusy, NoSpace or WorkerDied.
        OSError: A file cannot be read or written.
    """
    shard_size = check_int(shard_size, "the shard size", least=1)
    if shard_size > 4 << 30:
        raise UsageError(f"the shard size must be between 1 byte and 4 GiB, not {shard_size}")
    if to not in FORMATS:
        raise UsageError(f"unknown format {to!r}; choose from {', '.join(FORMATS)}")
    source, target = user_path(dataset), user_path(output)
    splits = splits_of(source) or {"": source}
    runner = JobRunner(workers, executor, progress := progress_or_bar(progress))
    planned = [_Export.plan(path, target / split, to, shard_size, progress) for split, path in splits.items()]
    sizes = {each.output: each.bytes_to_write() for each in planned}
    check_room({folder: size for folder, size in sizes.items() if size})
    try:
        return [each.run(runner) for each in planned]
    finally:
        _open_dataset.cache_clear()  # close the dataset that jobs in this process opened


MARKER = ".export.json"
"""The file that is published last; hidden, so that readers of images, tars and tables ignore it."""


Files = tuple[FileEntry, ...]
_Marker = tuple[Files, Files]
"""The record of a finished export: its units, and the files that describe them all."""


@dataclass(frozen=True)
class _Export:
    dataset: Path
    output: Path
    manifest: Manifest
    index: Rows
    format: ExportFormat
    units: tuple[Unit, ...]
    shard_size: int

    @classmethod
    def plan(cls, path: Path, output: Path, to: str, shard_size: int, progress: Progress) -> _Export:
        """Plan an export. Raises UsageError, DataError and OSError before anything is written."""
        with Dataset(path) as dataset:
            index, manifest = dataset.index, dataset.manifest
            source = ExportSource(
                path=dataset.path,
                root=manifest.root,
                split=manifest.split,
                labels=manifest.labels,
                schema=dataset.schema,
                has_images=manifest.has_images,
                has_labels=bool((index["label"] >= 0).any()),
                has_boxes=dataset.boxes is not None,
            )
            lengths = index["length"].astype(np.int64)
            for field in dataset.schema:
                lengths += dataset.columns.lengths(field.name)
        with progress.task(f"plan {manifest.split}", records=len(index), size=0):
            chosen = FORMATS[to](source, index, lambda done: progress.at(done, 0))
        if chosen.note:
            progress.note(f"{output}: {chosen.note}; {MARKER} has the order of their labels")
        bounds = list(shard_ranges(lengths, shard_size))
        units = tuple(
            Unit(chosen.unit_name(number, len(bounds)), number, first, last, int(lengths[first:last].sum()))
            for number, (first, last) in enumerate(bounds)
        )
        return cls(path, output, manifest, index, chosen, units, shard_size)

    def bytes_to_write(self) -> int:
        """Return the bytes to write. Raises UsageError for another export's output, OutputBusy, OSError."""
        refuse_busy(self.output)
        if self._read_marker() is not None:
            return 0
        check_output(self.output, [self.dataset.resolve()], work="an export")
        refuse_other_plan(self.output, self._guard, work="export")
        done = finished_shards(self.output)
        left = [unit for unit in self.units if unit.name not in done]
        return sum(unit.size + self.format.overhead * (unit.last - unit.first) for unit in left)

    def run(self, runner: JobRunner) -> Exported:
        marker, intact = self._read_marker(), dict[str, FileEntry]()
        if marker is not None:
            runner.progress.note(f"{self.output} is complete already; comparing its files")
            intact = self._find_intact(marker[0], runner)
            if len(intact) == len(self.units) and all(each.is_in(self.output) for each in marker[1]):
                remove_leftover(self.output)
                return self._exported(marker, already_complete=True)
        names = [unit.name for unit in self.units]
        resume_note = add_resume_note(lambda: describe_finished(self.output, names))
        with resume_note, WorkFolder(self.output) as work_folder:
            marker = self._build(work_folder, {} if self.format.has_parts else intact, runner)
        return self._exported(marker, already_complete=False)

    def _exported(self, files: _Marker, *, already_complete: bool) -> Exported:
        return Exported(
            path=self.output,
            to=self.format.name,
            split=self.manifest.split,
            records=self.manifest.records,
            root=self.manifest.root,
            files=sum(files, ()),
            already_complete=already_complete,
            has_images=self.manifest.has_images,
        )

    def _build(self, work_folder: WorkFolder, intact: Mapping[str, FileEntry], runner: JobRunner) -> _Marker:
        """Build and publish all but the ``intact`` units, and the files that describe them all."""
        work_folder.claim(self._guard, work="export")
        # absolute: a job may run in a process with another working directory
        folders = JobFolders(*map(Path.absolute, (self.output, work_folder.folder, work_folder.run)))
        to_build = [unit for unit in self.units if unit.name not in intact]
        done = finished_shards(self.output)
        if kept := describe_finished(self.output, [unit.name for unit in self.units]):
            runner.progress.note(f"{kept} already")
        dataset = self.dataset.absolute()
        jobs = (_Job(dataset, self.format, folders, unit, self._names(unit)) for unit in to_build)
        built = runner.run(f"export {self.manifest.split}", jobs, folders.run, to_build, done)
        entries = dict(intact) | {unit.name: unit for unit in built}
        units = tuple(entries[unit.name] for unit in self.units)
        index_files = tuple(self.format.finish(units, folders))
        value = {
            "format": "shardprep-export",
            "plan": self._guard,
            "classes": [each.name for each in self.manifest.labels.classes],
            "units": [each.to_json() for each in units],
            "index": [each.to_json() for each in index_files],
        }
        publish_bytes(folders.output / MARKER, canonical_json(value), folders.run)
        work_folder.remove()
        return units, index_files

    @property
    def _guard(self) -> dict[str, Any]:
        """The values that must not change when an export is resumed, under names known to users."""
        return {
            "to": self.format.name,
            "shard_size": self.shard_size,
            "writer": self.format.writer,
            "dataset": self.manifest.root,
        }

    def _read_marker(self) -> _Marker | None:
        """Return the marker if the export is finished. Raises PlanMismatch, DataError, OSError."""
        path = self.output / MARKER
        try:
            value = parse_canonical_json(read_small_file(path, damaged=DataError))
            units, index_files = (parse_as(tuple[FileEntry, ...], value[name]) for name in ("units", "index"))
            plan = dict(value["plan"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise DataError("was not written by an export; export to another folder", path=path) from error
        if differing := describe_differences(plan, self._guard):
            issue = f"holds a finished export: {differing}; choose another folder, or remove this one"
            raise PlanMismatch(issue, path=self.output)
        return units, index_files

    def _find_intact(self, units: Files, runner: JobRunner) -> dict[str, FileEntry]:
        if [unit.name for unit in units] != [unit.name for unit in self.units]:
            return {}

        def is_intact(unit: FileEntry, planned: Unit) -> bool:
            return self.format.is_intact(unit, self._names(planned), self.output)

        intact, done_records, done_bytes = {}, 0, 0
        records, size = len(self.index), sum(unit.size for unit in units)
        task = runner.progress.task(f"compare {self.manifest.split}", records=records, size=size)
        threads = usable_cpus() if runner.workers is None else max(1, runner.workers)
        with task, ThreadPoolExecutor(threads) as pool:
            for unit, is_whole in zip(units, pool.map(is_intact, units, self.units), strict=True):
                if is_whole:
                    intact[unit.name] = unit
                done_records, done_bytes = done_records + unit.records, done_bytes + unit.size
                runner.progress.at(done_records, done_bytes)
        return intact

    def _names(self, unit: Unit) -> tuple[str, ...]:
        return tuple(self.format.names(self.index[unit.first : unit.last]))


@dataclass(frozen=True)
class _Job(Job[FileEntry]):
    """The job of building a unit: ``shard`` has its name and records, ``names`` the format's record names."""

    dataset: Path
    format: ExportFormat
    folders: JobFolders
    shard: Unit
    names: tuple[str, ...]

    @property
    def output(self) -> Path:  # type: ignore[override]
        return self.folders.output

    def build(self) -> FileEntry:
        """Build and publish the unit, unless it is finished. Raises DataError, UsageError, OSError."""
        commit = self.folders.work / (self.shard.name + ".commit")
        try:
            unit: FileEntry = parse_as(FileEntry, parse_canonical_json(commit.read_bytes()))
            if self.format.is_intact(unit, self.names, self.output):
                return unit
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            pass
        unit = self.format.build(self.shard.name, self._records(), len(self.names), self.folders)
        publish_bytes(commit, canonical_json(unit.to_json()), self.folders.run)
        return unit

    def _records(self) -> Iterator[ExportRecord]:
        dataset, boxes = _open_dataset(self.dataset, self.format.source.root, self.folders.run)
        with closing(counted_range(self.folders.run, self.shard.number, len(self.names))) as ordinals:
            for done in ordinals:
                number = self.shard.first + done
                record = dataset[number]
                own = None
                if boxes is not None:
                    own = boxes[slice(*np.searchsorted(boxes["record"], [number, number + 1]))]
                yield ExportRecord(self.names[done], *record, dataset.index[number], own, record.columns)

    def key_at(self, place: int) -> str:
        dataset, _ = _open_dataset(self.dataset, self.format.source.root, self.folders.run)
        key: bytes = dataset.index["key"][min(self.shard.first + place, self.shard.last - 1)]
        return key.decode()


@lru_cache(maxsize=1)
def _open_dataset(path: Path, root: str, run: Path) -> tuple[Dataset, Rows | None]:
    """Open the dataset with this root, and return it with its boxes. Raises SourceDamaged.

    It is opened anew for each ``run``, because it may have been repaired since the last one.
    """
    dataset = open_with_root(path, root)
    return dataset, dataset.boxes
