"""Conversion in parts: several calls build the shards, and one without a part finishes."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardprep.formats.conversion.building.built_shard import BuiltShard
from shardprep.formats.conversion.building.plan import PlanOptions
from shardprep.formats.conversion.building.work_folder import WorkFolder, finished_shards, noting_kept
from shardprep.formats.dataset.manifest import MANIFEST_NAME
from shardprep.formats.errors import OutputBusy, UsageError
from shardprep.formats.progress import Progress, shown
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import Source
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.stored_entries import StoredEntries

from .convert import Run, build_shards, kept_of
from .preflight import check_output, refuse_network
from .preparation import ConvertOptions, Prepared, Request, prepare
from .running.job_runner import run_jobs
from .skipped import SkippedImages, sum_up


@dataclass(frozen=True)
class ConvertedPart:
    """What one part of a conversion has of one split.

    ``path`` is the split's folder, ``part`` the part's number and the number of parts, and ``shards`` has
    the names of its shards, all finished. ``records`` and ``file_bytes`` are those of these shards, and
    ``skipped`` the :class:`SkippedImages` of them. ``total`` is the number of the split's shards, of which
    ``missing`` are not finished yet. ``already_complete`` says that the whole split was finished before, so
    that nothing was read.
    """

    path: Path
    split: str
    part: tuple[int, int]
    shards: tuple[str, ...]
    records: int
    file_bytes: int
    total: int
    missing: int
    already_complete: bool
    skipped: SkippedImages = field(default_factory=SkippedImages)


def convert_part(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    part: tuple[int, int],
    *,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    source_options: SourceOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[ConvertedPart]:
    """Build the shards of one part of a conversion; publish no manifest.

    ``part`` is (i, n), the i-th of n, counted from 1. Shards are dealt to the parts one by one, over all
    splits. Parts run in any order, any number of them at a time, on any machines that see the same source
    and output; a part that is repeated, or runs twice at once, changes nothing. When all have ended,
    :func:`.convert.convert` with the same arguments builds what is missing, and finishes. The bytes are those
    of a conversion in one call.

    ``source``, ``output``, ``split``, ``plan_options``, ``options`` and ``source_options`` are those of
    :func:`.convert.convert`, and the same for all parts. ``workers`` and ``progress`` are as there, too.

    Raises what :func:`.convert.convert` raises: PlanMismatch if another part has other options or another
    source, or other libraries that write shards, and OutputBusy while the output is converted without
    ``part``. Raises UsageError for a part that does not exist, and for ``restart``.
    """
    progress = shown(progress)
    request = Request.of(source, output, split, plan_options, options, source_options, part)
    if request.options.restart:
        raise UsageError(
            "a part cannot restart, since other parts work there; remove the output, or restart without a part"
        )
    recognised = request.recognised()
    progress.note(f"source: {recognised.description}")
    prepared = _prepared(recognised, request, progress)
    building = _Building(request, partial(run_jobs, workers=workers, progress=progress), progress)
    with noting_kept(partial(kept_of, prepared, of_split=len(prepared) > 1)):
        return [building.built(one) for one in prepared]


def _prepared(source: Source, request: Request, progress: Progress) -> list[Prepared]:
    request.check_outputs(source)
    problems = Problems()
    for split, output in request.outputs(source).items():
        with problems.collected():
            _share_listing(source, split, output, request, progress)
    problems.raise_all()
    prepared = prepare(source, request, problems)
    problems.raise_all()
    return prepared


def _share_listing(source: Source, split: str, output: Path, request: Request, progress: Progress) -> None:
    """Read an archive's headers and store what they say, unless another part has; wait while one does.

    A check of MD5 is no part's work for the others, and folders are listed by each part: nothing less says
    that they have not changed.
    """
    is_finished = (output / MANIFEST_NAME).exists()
    known_by = None if is_finished or request.options.check_md5 else source.known_by(split)
    if known_by is None:
        return
    check_output(output, source.folders)
    if not request.options.allow_network_fs:
        refuse_network(output, request.plan_options.container)
    waits = partial(progress.note, f"another part reads the headers of {split}; this one waits for it")
    with WorkFolder(output, shared=True) as work_folder, work_folder.turn("listing", waits):
        stored = StoredEntries(work_folder.folder, known_by)
        if stored.read() is None and not (listing := source.survey(split)).problems:
            stored.write(listing.entries, work_folder.run)


@dataclass(frozen=True)
class _Building:
    """The building of one part's shards in every split."""

    request: Request
    run: Run
    progress: Progress

    def built(self, prepared: Prepared) -> ConvertedPart:
        if not prepared.is_finished:
            with WorkFolder(prepared.output, shared=True) as work_folder:
                if not prepared.is_finished:  # the conversion may have been finished since
                    work_folder.claim(prepared.guard())
                    built = build_shards(prepared, work_folder, self.run, self.progress)
                    return self._part(prepared, built)
            _remove_work_folder(prepared.output)
        self.progress.note(f"{prepared.output} is complete already")
        return self._complete(prepared)

    def _part(self, prepared: Prepared, built: list[BuiltShard]) -> ConvertedPart:
        planned = prepared.planned
        skipped = [image for shard in built for image in shard.skipped]
        done = finished_shards(prepared.output)
        return ConvertedPart(
            path=prepared.output,
            split=planned.split,
            part=self._numbers,
            shards=tuple(shard.name for shard in built),
            records=sum(shard.records for shard in built),
            file_bytes=sum(shard.size for shard in built),
            total=len(planned.shards),
            missing=sum(shard.name not in done for shard in planned.shards),
            already_complete=False,
            skipped=sum_up(skipped, planned.entries, prepared.listing.labels),
        )

    def _complete(self, prepared: Prepared) -> ConvertedPart:
        """Return the part of a finished dataset. Raises PlanMismatch if it has another plan, DataError."""
        names = {shard.name for shard in prepared.shards}
        shards = [entry for entry in prepared.finished_manifest().shards if entry.name in names]
        return ConvertedPart(
            path=prepared.output,
            split=prepared.planned.split,
            part=self._numbers,
            shards=tuple(entry.name for entry in shards),
            records=sum(entry.records for entry in shards),
            file_bytes=sum(entry.size for entry in shards),
            total=len(prepared.planned.shards),
            missing=0,
            already_complete=True,
        )

    @property
    def _numbers(self) -> tuple[int, int]:
        part = self.request.part
        return (part.number, part.of) if part else (1, 1)


def _remove_work_folder(output: Path) -> None:
    """Remove the work folder that this part made in a finished dataset; another part may do that."""
    with suppress(OutputBusy), WorkFolder(output) as work_folder:
        work_folder.remove()
