"""Conversion of a source to a dataset in object storage, through a scratch folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from shardprep.formats.conversion.convert import (
    build_shards,
    discard_unfinished,
    kept_of,
    notes_of,
    prepared_splits,
    skipped_of,
)
from shardprep.formats.conversion.finish import SkippedImages, gather
from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.conversion.prepare import ConvertOptions, PreparedSplit, Request
from shardprep.formats.conversion.shard import BuiltShard, ShardJob, build_shard, committed
from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.files import user_path
from shardprep.formats.runtime.jobs import JobRunner
from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder, noting_kept
from shardprep.formats.runtime.workers import usable_cpus
from shardprep.formats.shards.files import OUTPUT_FILES, FileEntry
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.read import IN_PLACE
from shardprep.formats.sources.source import SourceOptions
from shardprep.formats.storage.store import Location, RetryPolicy, StoredFile
from shardprep.formats.storage.transfer import TransferRun
from shardprep.formats.storage.writable import WritableFolder, refuse_server
from shardprep.formats.transfer.publish import RETRIES, TIMEOUT_S, Receipts, StorePlace, Upload


@dataclass(frozen=True)
class ConvertedTo:
    """One split that was converted into object storage.

    ``url`` is its place; ``manifest``, ``already_complete``, ``skipped``, ``ignored``, ``notes`` and
    ``has_labels`` are as in :class:`Converted`.
    """

    url: str
    manifest: Manifest
    already_complete: bool
    skipped: SkippedImages = field(default_factory=SkippedImages)
    ignored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    has_labels: bool = True


def convert_to_url(
    source: str | os.PathLike[str],
    url: str,
    *,
    scratch: str | os.PathLike[str] | None = None,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    source_options: SourceOptions | None = None,
    workers: int | None = None,
    retries: int = RETRIES,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> list[ConvertedTo]:
    """Convert a source to shards in object storage. After a kill at any point, the same call finishes it.

    The result has the bytes, and the root, of a local conversion. Each shard is built in ``scratch``,
    uploaded, proven to be in the store as :func:`~.publish.publish` does, and removed here. The tables and,
    only if there is none, the manifest come last. Of two different conversions to one URL, one gets an error.
    Needs obstore.

    Args:
        source: As for :func:`~.convert.convert`.
        url: Place of the dataset if ``split`` is given; else every split found is converted into
            ``url/<split>``. ``s3://``, ``gs://``, ``az://`` or ``file://``.
        scratch: Folder on this machine that keeps the state of the work until it ends, with room for the
            tables and one shard more than there are workers; give the same to continue. None is one in the
            user's cache folder, named by the URL.
        split: "train", "val" or "test"; None converts all.
        plan_options: As for :func:`~.convert.convert`.
        options: As for :func:`~.convert.convert`.
        source_options: As for :func:`~.convert.convert`.
        workers: Number of processes, as for :func:`~.convert.convert`.
        retries: Number of times to retry a failed request.
        timeout_s: Seconds without an answer after which a request fails.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The converted splits.

    Raises:
        ShardprepError: What :func:`~.convert.convert` and :func:`~.publish.publish` raise.
    """
    progress, place = shown(progress), Location.parse(url)
    caches = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    name = hashlib.sha256(place.url.encode()).hexdigest()[:16]
    folder = caches / "shardprep" / "scratch" / name if scratch is None else scratch
    request = replace(
        Request.of(source, folder, split, plan_options, options, source_options),
        kept_shards=1 + max(1, usable_cpus() if workers is None else workers),
    )
    if request.plan_options.container == IN_PLACE:
        raise UsageError(
            "images that stay in their archive are not uploaded; index them into a folder", path=url
        )
    refuse_server(place)
    runner = JobRunner(workers, progress=progress)
    policy = RetryPolicy(retries, timeout_s)
    prepared = prepared_splits(request, progress)
    done = []
    with (
        noting_kept(partial(kept_of, prepared), restarted=request.options.restart),
        LoopThread(threads=TABLES_AT_ONCE) as loop,
    ):
        if request.options.restart:
            discard_unfinished(prepared)
        for one in prepared:
            remote = WritableFolder(place if split else place.child(one.planned.split), policy)
            to = StorePlace(remote, canonical_json({"plan": sha256_of(one.guard())}))
            done.append(_StoredSplit(request.output, one, to, policy, runner, loop).converted())
    return done


@dataclass(frozen=True)
class StoringBuilder:
    """Builds a shard, and brings its files to a ``place``. Picklable.

    A file is removed here when it is proven there, after a receipt of that. A shard of which the rows and the
    receipts are here, and the files as these say there, is neither built nor uploaded again.
    """

    place: Location
    policy: RetryPolicy

    def __call__(self, job: ShardJob) -> BuiltShard:
        """Build the shard if its files are not there, and bring them there. Safe to kill and repeat.

        Raises what :func:`.build_shard` and :meth:`.Upload.run` raise.
        """
        remote, receipts = WritableFolder(self.place, self.policy), Receipts(job.work_folder)

        async def is_stored(file: FileEntry) -> bool:
            receipt = receipts.of(file)
            return receipt is not None and await remote.about(file.name) == receipt

        with LoopThread(threads=1) as loop:
            commit = committed(job)
            missing = [file for file in commit.files if not loop.run(is_stored(file))] if commit else []
            if commit is None or not all(file.is_in(job.output) for file in missing):
                commit = build_shard(job)
                missing = [file for file in commit.files if not loop.run(is_stored(file))]
            for file in missing:
                upload = Upload(remote, file, job.output / file.name)
                loop.run(upload.run())
                if upload.stored:
                    receipts.write(file, upload.stored, job.run)
        for file in commit.files:
            with suppress(FileNotFoundError):
                (job.output / file.name).unlink()
        return commit


TABLES_AT_ONCE = 4


@dataclass(frozen=True)
class _StoredSplit:
    """One split, and the place for it.

    ``scratch`` has the folders in which splits are built, or is one.
    """

    scratch: Path
    prepared: PreparedSplit
    place: StorePlace
    policy: RetryPolicy
    runner: JobRunner
    loop: LoopThread

    def converted(self) -> ConvertedTo:
        """Convert the split, unless it is there already."""
        prepared, run = self.prepared, self.loop.run
        if (found := run(self.place.published())) is None:
            with WorkFolder(prepared.output) as work_folder:
                work_folder.claim(prepared.guard())
                run(self.place.begin(()))
                if (found := run(self.place.published())) is None:  # another run may have finished it since
                    return self._converted(work_folder)
        return self._already_there(found)

    def _converted(self, work_folder: WorkFolder) -> ConvertedTo:
        prepared, place = self.prepared, self.place
        builder = StoringBuilder(place.remote.place, self.policy)
        built = build_shards(prepared, work_folder, self.runner, builder)
        manifest = gather(work_folder, prepared, built)
        receipts, proven, uploads = Receipts(work_folder.folder), dict[str, StoredFile](), []
        shards = {file.name for shard in built for file in shard.files}
        for file in manifest.files:
            if file.name not in shards:
                uploads.append(Upload(place.remote, file, prepared.output / file.name))
            elif (stored := receipts.of(file)) is not None:
                proven[file.name] = stored
        TransferRun(self.loop, TABLES_AT_ONCE, self.runner.progress).run("publish", manifest, uploads)
        proven |= {each.entry.name: each.stored for each in uploads if each.stored}
        self.loop.run(place.finish(manifest.to_bytes(), proven))
        work_folder.discard(OUTPUT_FILES)
        work_folder.remove()
        self._remove_scratch()
        return replace(
            self._done(manifest), skipped=skipped_of(prepared, built), notes=notes_of(prepared, built)
        )

    def _already_there(self, manifest: Manifest) -> ConvertedTo:
        """Return the finished dataset. Raises PlanMismatch for another plan, RemoteDamaged."""
        done, prepared = self._done(manifest), self.prepared
        prepared.refuse_other(manifest, done.url)
        self.runner.progress.note(f"{done.url} is complete already")
        self.loop.run(self.place.check_sizes(manifest))
        self.loop.run(self.place.drop_leftover())
        if (prepared.output / WORK_FOLDER_NAME).exists():
            with WorkFolder(prepared.output) as work_folder:
                work_folder.discard(OUTPUT_FILES)
                work_folder.remove()
        self._remove_scratch()
        return replace(done, already_complete=True)

    def _done(self, manifest: Manifest) -> ConvertedTo:
        return ConvertedTo(
            self.place.remote.place.url,
            manifest,
            already_complete=False,
            ignored=self.prepared.listing.ignored,
            notes=self.prepared.listing.notes,
            has_labels=self.prepared.planned.has_labels,
        )

    def _remove_scratch(self) -> None:
        with suppress(OSError):  # it is not empty, or never was
            for folder in dict.fromkeys((self.prepared.output, self.scratch)):
                folder.rmdir()
