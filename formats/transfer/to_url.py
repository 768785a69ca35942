"""Converting a source to a dataset in object storage, through a scratch folder."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

from shardprep.formats.conversion.convert import ConvertedSplit, build_shards, convert_each, gather, outcome
from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.conversion.prepare import Conversion, ConvertOptions, PreparedSplit
from shardprep.formats.conversion.shard import BuiltShard, ShardJob, build_shard, committed, committed_as
from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.files import user_path
from shardprep.formats.runtime.jobs import JobRunner
from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.processes import usable_cpus
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder
from shardprep.formats.shards.read import IN_PLACE, OUTPUT_FILES, FileEntry
from shardprep.formats.sources.source import SourceOptions
from shardprep.formats.storage.store import Location, RemoteFolder, RetryPolicy, StoredFile, refuse_server
from shardprep.formats.storage.transfer import TransferRun
from shardprep.formats.transfer.publish import RETRIES, TIMEOUT_S, StorePlace, Upload, refuse_dataset, upload

TABLES_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class ConvertedTo(ConvertedSplit):
    """One split that was converted into object storage, at ``url``.

    ``manifest``, ``already_complete``, ``skipped``, ``ignored``, ``notes`` and ``has_labels`` are as in
    :class:`.Converted`.
    """

    url: str


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

    The result has the same bytes and root as a local conversion. Each shard is built in ``scratch``,
    uploaded, verified as :func:`~.publish.publish` does, and removed from ``scratch``. The tables and, if
    there is none, the manifest come last. Of two different conversions to one URL, one fails. Needs obstore.

    Args:
        source: As for :func:`~.convert.convert`.
        url: URL of the dataset if ``split`` is given; otherwise, all splits are converted into
            ``url/<split>``. ``s3://``, ``gs://``, ``az://`` or ``file://``.
        scratch: Local folder for the state of the conversion, with room for the tables and one shard more
            than there are workers; give the same folder to continue. None is a folder in the user's cache
            folder, named by the URL.
        split: "train", "val" or "test"; None converts all.
        plan_options: As for :func:`~.convert.convert`.
        options: As for :func:`~.convert.convert`.
        source_options: As for :func:`~.convert.convert`.
        workers: Number of processes, as for :func:`~.convert.convert`.
        retries: Number of times to retry a failed request.
        timeout_s: Seconds without a response after which a request fails.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The converted splits.

    Raises:
        ShardprepError: The errors of :func:`~.convert.convert` and :func:`~.publish.publish`.
    """
    progress, place = shown(progress), Location.parse(url)
    caches = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    name = hashlib.sha256(place.url.encode()).hexdigest()[:16]
    conversion = Conversion(
        source,
        caches / "shardprep" / "scratch" / name if scratch is None else scratch,
        split,
        plan_options,
        options,
        source_options,
        kept_shards=1 + max(1, usable_cpus() if workers is None else workers),
    )
    if conversion.plan_options.container == IN_PLACE:
        raise UsageError(
            "images that stay in their archive are not uploaded; index them into a folder", path=url
        )
    refuse_server(place)
    runner = JobRunner(workers, progress=progress)
    policy = RetryPolicy(retries, timeout_s)
    with LoopThread(threads=TABLES_AT_ONCE) as loop:
        if split is None:
            loop.run(refuse_dataset(place, policy))

        def convert_one(one: PreparedSplit) -> ConvertedTo:
            remote = RemoteFolder(place if split else place.child(one.listing.split), policy, writable=True)
            to = StorePlace(remote, canonical_json({"plan": sha256_of(one.guard())}))
            done = _converted(one, to, policy, runner, loop)
            with suppress(OSError):  # not empty, or never created
                for folder in dict.fromkeys((one.output, conversion.output)):
                    folder.rmdir()
            return done

        return convert_each(conversion, progress, convert_one)


def _converted(
    prepared: PreparedSplit, place: StorePlace, policy: RetryPolicy, runner: JobRunner, loop: LoopThread
) -> ConvertedTo:
    """Convert a split unless it is published already."""
    url = place.remote.place.url
    if (found := loop.run(place.published())) is None:
        with WorkFolder(prepared.output) as work_folder:
            work_folder.claim(prepared.guard())
            loop.run(place.begin(()))
            builder = partial(_build_stored, place.remote.place, policy)
            built = build_shards(prepared, work_folder, runner, builder)
            manifest = gather(work_folder, prepared, built)
            stored = {name: StoredFile(**of) for shard in built for name, of in shard.stored.items()}
            transfers = TransferRun(loop, TABLES_AT_ONCE, runner.progress)
            upload(work_folder.output, manifest, place, transfers, stored)
            work_folder.discard(OUTPUT_FILES)
            work_folder.remove()
            return ConvertedTo(url=url, **outcome(prepared, manifest, built))
    prepared.refuse_other(found, url)
    runner.progress.note(f"{url} is complete already")
    loop.run(place.check_sizes(found))
    loop.run(place.drop_claim())
    if (prepared.output / WORK_FOLDER_NAME).exists():
        with WorkFolder(prepared.output) as work_folder:
            work_folder.discard(OUTPUT_FILES)
            work_folder.remove()
    return ConvertedTo(url=url, **outcome(prepared, found, None))


def _build_stored(place: Location, policy: RetryPolicy, job: ShardJob) -> BuiltShard:
    """Build a shard and upload its files, unless they are stored. Safe to kill and repeat.

    A local file is removed once its upload is verified, and in the commit record. A shard whose rows exist
    and whose record matches the stored files is neither built nor uploaded again.
    """
    remote = RemoteFolder(place, policy, writable=True)
    with LoopThread(threads=1) as loop:

        def missing(commit: BuiltShard) -> list[FileEntry]:
            now = {name: loop.run(remote.about(name)) for name in commit.stored}
            same = {name for name, about in now.items() if about and asdict(about) == commit.stored[name]}
            return [file for file in commit.files if file.name not in same]

        commit = committed(job)
        if commit is None or not all(file.is_in(job.output) for file in missing(commit)):
            commit = build_shard(job)
        for file in missing(commit):
            sent = Upload(remote, file, job.output / file.name)
            loop.run(sent.run())
            if sent.stored:
                stored = {**commit.stored, file.name: asdict(sent.stored)}
                commit = committed_as(job, replace(commit, stored=stored))
    for file in commit.files:
        (job.output / file.name).unlink(missing_ok=True)
    return commit
