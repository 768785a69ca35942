"""Conversion of a source to published shards and, last, their manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.containers.archive import ARCHIVE_NAME, is_linked, link_archive
from shardprep.formats.containers.registry import IN_PLACE
from shardprep.formats.conversion.building.build_shard import ShardJob
from shardprep.formats.conversion.building.built_shard import BuiltShard, SkippedImage
from shardprep.formats.conversion.building.machine import versions_for
from shardprep.formats.conversion.building.plan import PlanOptions
from shardprep.formats.conversion.building.progress_counters import COUNTERS_NAME, ProgressCounters
from shardprep.formats.conversion.building.shard_jobs import shard_jobs
from shardprep.formats.conversion.building.work_folder import WorkFolder, finished_shards, noting_kept
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.dataset.verification.manifest_claims import quarantined
from shardprep.formats.errors import UsageError
from shardprep.formats.progress import Progress, shown
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import Listing
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.stored_entries import StoredEntries
from shardprep.formats.system.storage.location import Location

from .finalize import finish, verify_finished
from .preparation import ConvertOptions, Prepared, Request, note_untrained, prepare
from .running.executor_run import runner
from .skipped import SkippedImages, sum_up

Run = Callable[[Iterable[ShardJob], ProgressCounters], list[BuiltShard]]
"""What runs the jobs of shards, and returns these in order."""


@dataclass(frozen=True)
class Converted:
    """One converted split.

    ``path`` is its folder, ``manifest`` its :class:`Manifest`, and ``already_complete`` whether an earlier
    call had finished it, so that it was verified only. ``skipped`` are the :class:`SkippedImages`: bad images
    that were left out, by cause, and the classes of which none is left. ``ignored`` counts the files and
    folders of file managers, and hidden ones, that were left out of the source, by name.
    """

    path: Path
    manifest: Manifest
    already_complete: bool
    skipped: SkippedImages = field(default_factory=SkippedImages)
    ignored: Mapping[str, int] = field(default_factory=dict)


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    source_options: SourceOptions | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Converted]:
    """Convert a source to shards. After a kill at any point, the same call finishes the conversion.

    The result has the same bytes for any number of workers and interruptions.

    ``source`` is the path of the archives, the image tree, the tensorpack LMDB, the tars of WebDataset, the
    TFRecord or Parquet files, or a list of images; or the URL of a folder of official archives in object
    storage or on a server, which are read in place by ranges.
    ``output`` is the folder of the dataset if ``split`` ("train", "val" or "test") is given; otherwise every
    split found is converted into ``output/<split>``. ``plan_options`` decide the bytes of the output,
    ``options`` do not, and ``source_options`` say how the source is read; None takes the defaults of
    :class:`PlanOptions`, :class:`ConvertOptions` and :class:`SourceOptions`. ``workers`` is the
    number of processes; None is one per usable CPU, and 0 works in this process, except for decode checks,
    which need a process that may crash. An ``executor`` of :mod:`concurrent.futures`, of this machine or of
    many, runs the shard jobs instead, and is left open: at most ``workers`` jobs are submitted at a time,
    None is 256. ``progress`` receives the progress; None shows a bar in a notebook.

    An interruption, such as KeyboardInterrupt, gets a note that says how many shards the next call keeps.

    Raises UsageError (PlanMismatch if ``output`` holds another conversion), DataError if the source is
    damaged or incomplete, OperationError (OutputBusy, NoSpace, WorkerDied; ExecutorFailed and OtherMachine
    with an ``executor``), and OSError.
    """
    progress = shown(progress)
    request = Request.of(source, output, split, plan_options, options, source_options)
    if executor is not None and isinstance(request.source, Location):
        raise UsageError(
            "is a URL, from which one machine converts; leave out the executor, or download the archives",
            path=request.source.url,
        )
    recognised = request.recognised()
    progress.note(f"source: {recognised.description}")
    request.check_outputs(recognised)
    problems = Problems()
    prepared = prepare(recognised, request, problems)
    problems.raise_all()
    note_untrained(prepared, progress)
    run: Run = runner(executor, workers, progress)
    conversion = _Conversion(
        request.options, run, progress, of_split=len(prepared) > 1, elsewhere=executor is not None
    )
    again = "the same command without --restart" if request.options.restart else "the same command"
    with noting_kept(conversion.kept, again):
        return [conversion.convert(one) for one in prepared]


@dataclass(frozen=True)
class _Conversion:
    """The state that is the same for every split of one source."""

    options: ConvertOptions
    run: Run
    progress: Progress
    of_split: bool
    elsewhere: bool
    begun: list[Prepared] = field(default_factory=list)

    def convert(self, prepared: Prepared) -> Converted:
        if not prepared.is_finished:
            with WorkFolder(prepared.output) as work_folder:
                if not prepared.is_finished:  # another run may have finished it since
                    return self._converted(prepared, work_folder)
        return _already_there(prepared, self.progress)

    def kept(self) -> str:
        """Return how many of the shards of each split that was begun are done; empty if none is."""
        return kept_of(self.begun, of_split=self.of_split)

    def _converted(self, prepared: Prepared, work_folder: WorkFolder) -> Converted:
        if self.options.restart:
            work_folder.discard()
        planned, listing = prepared.planned, prepared.listing
        work_folder.claim(prepared.guard())
        self.begun.append(prepared)
        built = build_shards(prepared, work_folder, self.run, self.progress, elsewhere=self.elsewhere)
        manifest = finish(work_folder, planned, listing, built, prepared.boxes)
        skipped = sum_up(
            [image for shard in built for image in shard.skipped], planned.entries, listing.labels
        )
        return Converted(
            work_folder.output, manifest, already_complete=False, skipped=skipped, ignored=listing.ignored
        )


def build_shards(
    prepared: Prepared, work_folder: WorkFolder, run: Run, progress: Progress, *, elsewhere: bool = False
) -> list[BuiltShard]:
    """Build the shards of a split that are to be built, and return them; those that are there are kept.

    ``elsewhere`` is whether other machines may build them.
    """
    planned, shards = prepared.planned, prepared.shards
    _keep_listing(prepared.listing, work_folder)
    counters = ProgressCounters(work_folder.run / COUNTERS_NAME, shards)
    home = versions_for(planned.options) if elsewhere else None
    jobs = shard_jobs(planned, shards, prepared.listing.reader, work_folder, home=home)
    finished = shards_done(prepared)
    if finished:
        progress.note(f"{len(finished)} of {len(shards)} shards are done already")
    left = [shard.extent for shard in shards if shard.name not in finished]
    records, total = sum(e.records for e in left), sum(e.payload_bytes for e in left)
    verb = "index" if planned.options.container == IN_PLACE else "convert"
    with progress.task(f"{verb} {planned.split}", records=records, size=total):
        return run(jobs, counters)


def _keep_listing(listing: Listing, work_folder: WorkFolder) -> None:
    if listing.kept_by is not None:
        stored = StoredEntries(work_folder.folder, listing.kept_by)
        if stored.read() is None:
            stored.write(listing.entries, work_folder.run)


def shards_done(prepared: Prepared) -> set[str]:
    """Return the names of those shards of a split that are to be built, and are."""
    names = {shard.name for shard in prepared.shards}
    return names if prepared.is_finished else names & finished_shards(prepared.output)


def kept_of(begun: Iterable[Prepared], *, of_split: bool) -> str:
    """Return how many of the shards of each split are done, named with ``of_split``; empty if none is."""
    parts = [
        f"{done} of {len(one.shards)} shards" + (f" of {one.planned.split}" if of_split else "")
        for one in begun
        if (done := len(shards_done(one)))
    ]
    return f"{', '.join(parts)} are done" if parts else ""


def _already_there(prepared: Prepared, progress: Progress) -> Converted:
    """Verify a finished output. Raises PlanMismatch if it has another plan, DataError if it is damaged."""
    output = prepared.output
    manifest = prepared.finished_manifest()
    link, archive = output / ARCHIVE_NAME, prepared.listing.reader.archive
    if manifest.archive and archive and not is_linked(link, archive.path):  # it has moved
        with WorkFolder(output) as work_folder:
            link_archive(link, archive.path, work_folder.run)
            work_folder.remove()
    verify_finished(output, progress)
    return Converted(
        output,
        manifest,
        already_complete=True,
        skipped=_skipped_in(output, manifest, prepared),
        ignored=prepared.listing.ignored,
    )


def _skipped_in(output: Path, manifest: Manifest, prepared: Prepared) -> SkippedImages:
    skipped = [SkippedImage(**image) for image in quarantined(output)] if manifest.skipped else []
    return sum_up(skipped, prepared.planned.entries, manifest.labels)
