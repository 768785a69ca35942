"""The export of a dataset, or of a folder of splits, to the format of another loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.conversion.building.plan import DEFAULT_SHARD_SIZE
from shardprep.formats.conversion.building.progress_counters import COUNTERS_NAME, ProgressCounters
from shardprep.formats.conversion.building.work_folder import WorkFolder, finished_shards, noting_kept
from shardprep.formats.conversion.preflight import check_room
from shardprep.formats.conversion.running.executor_run import runner
from shardprep.formats.dataset.splits import splits_of
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.formats.progress import Progress, shown
from shardprep.formats.system.atomic_write import publish_bytes
from shardprep.formats.system.user_path import user_path

from .export_format import is_file_intact
from .export_job import ExportJob, opened
from .planned_export import MARKER, Marker, PlannedExport, places
from .registry import export_format

MOST_SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Exported:
    """One exported split.

    ``path`` is its folder and ``to`` the format; ``split``, ``records`` and ``root`` are the dataset's.
    ``files`` are the units of the export with their sizes and SHA-256 (of ``folders``, groups of
    images), then the files about all of them. ``already_complete`` is whether an earlier call had finished
    it, so that its files were compared only.
    """

    path: Path
    to: str
    split: str
    records: int
    root: str
    files: tuple[FileEntry, ...]
    already_complete: bool


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
    """Export a dataset to the format of another loader. After a kill at any point, the same call finishes it.

    The result has the same bytes for any number of workers and interruptions. Images are exported as they
    are, each checked against its checksum, in the order of the dataset.

    ``dataset`` is the folder of a dataset, or a folder of splits, of which each is exported into
    ``output/<split>``. ``output`` is a new or empty folder, or one that the same call began or finished. A
    finished export is compared with what was written, and what is damaged is built again. ``to`` is
    "webdataset", "tfrecord", "mds", "parquet" (needs pyarrow) or "folders". ``shard_size`` is the number of
    bytes of images and columns in one file, at most 4 GiB. ``workers`` is the number of processes; None is
    one per usable CPU, and 0 works in this process. An ``executor`` runs the jobs instead, at
    most ``workers`` of them (None: 256) submitted at a time, and is left open. ``progress`` receives the
    progress; None shows a bar in a notebook.

    Raises UsageError for what the format cannot hold, with the name of the column, and for an output with
    anything else (PlanMismatch if it holds another export); DataError if the dataset is damaged;
    OperationError (OutputBusy, NoSpace, WorkerDied), and OSError.
    """
    if not 0 < shard_size <= MOST_SHARD_BYTES:
        raise UsageError(f"the shard size must be between 1 byte and 4 GiB, not {shard_size}")
    kind, source, target = export_format(to), user_path(dataset), user_path(output)
    splits = splits_of(source) or {"": source}
    planned = [PlannedExport.of(path, target / split, kind, shard_size) for split, path in splits.items()]
    for one in planned:
        one.check()
    check_room({one.output: needed for one in planned if (needed := one.bytes_to_write())})
    progress = shown(progress)
    run: Callable[[Iterable[ExportJob], ProgressCounters], list[FileEntry]] = runner(
        executor, workers, progress
    )
    work = _Exporting(run, progress, threads=usable_cpus() if workers is None else max(1, workers))
    try:
        with noting_kept(work.kept):
            return [work.export(one) for one in planned]
    finally:
        opened.cache_clear()  # the dataset of jobs in this process


@dataclass(frozen=True)
class _Exporting:
    """The state that is the same for all splits."""

    run: Callable[[Iterable[ExportJob], ProgressCounters], list[FileEntry]]
    progress: Progress
    threads: int
    begun: list[PlannedExport] = field(default_factory=list)

    def export(self, planned: PlannedExport) -> Exported:
        marker = planned.marker()
        if marker is not None and self._is_intact(planned, marker):
            return _exported(planned, marker, already_complete=True)
        with WorkFolder(planned.output) as work_folder:
            return _exported(planned, self._published(planned, work_folder), already_complete=False)

    def kept(self) -> str:
        """Return how many of the files of each split that was begun are done; empty if none is."""
        parts = [
            f"{done} of {len(one.units)} shards of {one.manifest.split}"
            for one in self.begun
            if (done := len(finished_shards(one.output)))
        ]
        return f"{', '.join(parts)} are done" if parts else ""

    def _published(self, planned: PlannedExport, work_folder: WorkFolder) -> Marker:
        work_folder.claim(planned.guard, work="export")
        self.begun.append(planned)
        earlier = planned.marker()
        known = {} if earlier is None or planned.format.has_parts else {u.name: u for u in earlier.units}
        counters = ProgressCounters(work_folder.run / COUNTERS_NAME, planned.units)
        if done := finished_shards(planned.output):
            self.progress.note(f"{len(done)} of {len(planned.units)} shards are done already")
        left = [unit.extent for unit in planned.units if unit.name not in done]
        records, size = sum(each.records for each in left), sum(each.payload_bytes for each in left)
        with self.progress.task(f"export {planned.manifest.split}", records=records, size=size):
            units = self.run(planned.jobs(work_folder, known), counters)
        index = planned.format.finish(units, places(work_folder))
        classes = tuple(each.name for each in planned.manifest.labels.classes)
        marker = Marker(planned.guard, classes, tuple(units), tuple(index))
        publish_bytes(planned.output / MARKER, marker.to_bytes(), work_folder.run)
        work_folder.remove()
        return marker

    def _is_intact(self, planned: PlannedExport, marker: Marker) -> bool:
        """Whether all files of a finished export are there as they were written."""
        output = planned.output
        self.progress.note(f"{output} is complete already; comparing its files")
        if [unit.name for unit in marker.units] != [unit.name for unit in planned.units]:
            return False
        size = sum(unit.size for unit in marker.units)
        records = intact = done = 0
        task = self.progress.task(f"compare {planned.manifest.split}", records=len(planned.index), size=size)
        with task, ThreadPoolExecutor(self.threads) as pool:
            with starting_thread():
                found = pool.map(partial(_is_unit_intact, planned), range(len(marker.units)), marker.units)
            for unit, whole in zip(marker.units, found, strict=True):
                records, done, intact = records + unit.records, done + unit.size, intact + whole
                self.progress.at(records, done)
        return intact == len(marker.units) and all(is_file_intact(each, output) for each in marker.index)


def _is_unit_intact(planned: PlannedExport, number: int, unit: FileEntry) -> bool:
    return planned.format.is_intact(unit, planned.names(planned.units[number]), planned.output)


def _exported(planned: PlannedExport, marker: Marker, *, already_complete: bool) -> Exported:
    return Exported(
        path=planned.output,
        to=planned.format.name,
        split=planned.manifest.split,
        records=planned.manifest.records,
        root=planned.manifest.root,
        files=(*marker.units, *marker.index),
        already_complete=already_complete,
    )
