"""Conversion of a source to published shards and, last, their manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardprep.formats.dataset.manifest import MANIFEST_NAME, WORK_FOLDER_NAME, Manifest, read_manifest
from shardprep.formats.dataset.verify import verify
from shardprep.formats.errors import PlanMismatch, SourceIncomplete
from shardprep.formats.progress import NoProgress, Progress
from shardprep.formats.sources.listing.source import Listing, Source
from shardprep.formats.sources.recognise import recognise

from .build_shard import BuiltShard, ShardJob, shard_jobs
from .finalize import finish
from .job_runner import run_jobs
from .kept_work import converted, noting_kept
from .plan import Plan, PlannedShard, PlanOptions, plan
from .preflight import check_output, check_space, refuse_network
from .progress_counters import COUNTERS_NAME, ProgressCounters
from .tables import GatheredBoxes, gathered_boxes
from .work_folder import WorkFolder, finished_shards, refuse_busy


@dataclass(frozen=True)
class Converted:
    """One converted split.

    ``path`` is its folder, ``manifest`` its :class:`Manifest`, and ``already_complete`` whether an earlier
    call had finished it, so that it was verified only.
    """

    path: Path
    manifest: Manifest
    already_complete: bool


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion that do not change the bytes of its output.

    ``allow_partial`` accepts a wrong number of images; ``restart`` discards unfinished work;
    ``check_md5`` reads official archives whole and checks their MD5; ``allow_network_fs`` builds LMDB
    on a network file system, too. All are False by default.
    """

    allow_partial: bool = False
    restart: bool = False
    check_md5: bool = False
    allow_network_fs: bool = False


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Converted]:
    """Convert a source to shards. After a kill at any point, the same call finishes the conversion.

    The result has the same bytes for any number of workers and interruptions.

    ``source`` is the path of the archives, the image tree or the tensorpack LMDB. ``output`` is the folder
    of the dataset if ``split`` ("train", "val" or "test") is given; otherwise every split found is
    converted into ``output/<split>``. ``plan_options`` decide the bytes of the output, and ``options`` do
    not; None takes the defaults of :class:`PlanOptions` and :class:`ConvertOptions`. ``workers`` is the
    number of processes; None is one per usable CPU, and 0 works in this process, except for decode checks,
    which need a process that may crash. An ``executor`` runs the shard jobs instead, and is left open.
    ``progress`` receives the progress; None shows none.

    An interruption, such as KeyboardInterrupt, gets a note that says how many shards the next call keeps.

    Raises UsageError (PlanMismatch if ``output`` holds another conversion), DataError if the source is
    damaged or incomplete, OperationError (OutputBusy, NoSpace, WorkerDied), and OSError.
    """
    options = options or ConvertOptions()
    progress = progress or NoProgress()
    recognised = recognise(Path(source), split=split, check_md5=options.check_md5)
    progress.note(f"source: {recognised.description}")
    splits = (split,) if split else recognised.splits
    outputs = {name: Path(output) if split else Path(output) / name for name in splits}
    for path in outputs.values():
        refuse_busy(path)
    run = partial(run_jobs, workers=workers, executor=executor, progress=progress)
    conversion = _Conversion(recognised, plan_options or PlanOptions(), options, run, progress)
    kept = partial(converted, conversion.begun, {path: name for name, path in outputs.items()})
    again = "the same command without --restart" if options.restart else "the same command"
    with noting_kept(kept, again):
        return [conversion.convert(name, path) for name, path in outputs.items()]


@dataclass(frozen=True)
class _Conversion:
    """The state that is the same for every split of one source."""

    source: Source
    plan_options: PlanOptions
    options: ConvertOptions
    run: Callable[[Iterable[ShardJob], ProgressCounters], list[BuiltShard]]
    progress: Progress
    begun: dict[Path, Sequence[PlannedShard]] = field(default_factory=dict)

    def convert(self, split: str, output: Path) -> Converted:
        listing = self.source.listing(split)
        _check_count(listing, allow_partial=self.options.allow_partial)
        planned = plan(listing, self.plan_options)
        boxes = gathered_boxes(self.source, split, listing)
        if not _is_finished(output):
            self._check_output(output, planned)
            with WorkFolder(output) as work_folder:
                if not _is_finished(output):  # another run may have finished it since
                    return self._converted(planned, listing, boxes, work_folder)
        return _already_there(output, planned, self.progress)

    def _converted(
        self, planned: Plan, listing: Listing, boxes: GatheredBoxes | None, work_folder: WorkFolder
    ) -> Converted:
        if self.options.restart:
            work_folder.discard()
        work_folder.claim(_guard(planned, listing, boxes))
        built = self._build(planned, listing, work_folder)
        manifest = finish(work_folder, planned, listing, built, boxes)
        return Converted(work_folder.output, manifest, already_complete=False)

    def _check_output(self, output: Path, planned: Plan) -> None:
        check_output(output, self.source)
        if not self.options.allow_network_fs:
            refuse_network(output, planned.options.container)
        check_space(output, planned)

    def _build(self, planned: Plan, listing: Listing, work_folder: WorkFolder) -> list[BuiltShard]:
        counters = ProgressCounters(work_folder.run / COUNTERS_NAME, planned.shards)
        jobs = shard_jobs(planned, planned.shards, listing.reader, work_folder)
        finished = finished_shards(work_folder.output)
        if finished:
            self.progress.note(f"{len(finished)} of {len(planned.shards)} shards are done already")
        left = [shard.extent for shard in planned.shards if shard.name not in finished]
        records, total = sum(e.records for e in left), sum(e.payload_bytes for e in left)
        self.begun[work_folder.output] = planned.shards
        with self.progress.task(f"convert {planned.split}", records=records, size=total):
            return self.run(jobs, counters)


def _check_count(listing: Listing, *, allow_partial: bool) -> None:
    found = len(listing.entries)
    if listing.expected not in (None, found) and not allow_partial:
        detail = f" ({listing.shortfall})" if listing.shortfall else ""
        raise SourceIncomplete(
            f"the split {listing.split} has {found} images, not {listing.expected}{detail}; "
            "add --allow-partial to convert what is there"
        )


def _is_finished(output: Path) -> bool:
    return (output / MANIFEST_NAME).exists()


def _already_there(output: Path, planned: Plan, progress: Progress) -> Converted:
    """Verify a finished output. Raises PlanMismatch if it has another plan, DataError if it is damaged."""
    manifest = read_manifest(output)
    if manifest.plan.get("sha256") != planned.digest:
        raise PlanMismatch(
            "holds a finished dataset of another plan (other options or another source); "
            "choose another output, or remove it",
            path=output,
        )
    progress.note(f"{output} is complete already; verifying it")
    report = verify(output, level="full", progress=progress)
    report.raise_for_findings()
    if (output / WORK_FOLDER_NAME).exists():
        with WorkFolder(output) as work_folder:
            work_folder.remove()
    return Converted(output, manifest, already_complete=True)


def _guard(planned: Plan, listing: Listing, boxes: GatheredBoxes | None) -> dict[str, Any]:
    """Return what must be equal when a conversion is resumed, by names that the user understands."""
    times = hashlib.sha256()
    for start in range(0, len(planned.order), 1 << 16):
        rows = planned.order[start : start + (1 << 16)]
        for column in ("path", "offset", "mtime_ns"):
            times.update(planned.entries[column][rows].tobytes())
    options = {name.replace("_", " "): value for name, value in asdict(planned.options).items()}
    archives = [[a.name, a.size, a.mtime_ns] for a in listing.archives]
    return options | {
        "split": planned.split,
        "source": [archives, times.hexdigest()],
        "images": planned.digest,
        "boxes": boxes.digest if boxes else None,
    }
