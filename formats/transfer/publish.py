"""Publishing datasets in object storage: upload, proof, and last the manifest.

A finished dataset is uploaded from its folder; a conversion uploads each shard from a scratch folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardprep.formats.conversion.convert import (
    ConvertedSplit,
    SkippedImages as SkippedImages,
    build_shards,
    outcome,
    prepare_and_convert,
)
from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.conversion.prepare import Conversion, ConvertOptions, PreparedSplit
from shardprep.formats.conversion.shard import (
    BuiltShard,
    ShardJob,
    build_shard,
    publish_tables,
    read_commit,
    write_commit,
)
from shardprep.formats.errors import ManifestDamaged, OperationError, PlanMismatch, ShardDamaged, UsageError
from shardprep.formats.runtime.files import read_at
from shardprep.formats.runtime.jobs import JobRunner
from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from shardprep.formats.runtime.loop_thread import LoopThread, call_in_thread
from shardprep.formats.runtime.processes import usable_cpus
from shardprep.formats.runtime.progress import Progress, check_int, progress_or_bar
from shardprep.formats.runtime.user_paths import caches_folder, user_path
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder, refuse_cached
from shardprep.formats.shards.dataset import refuse_in_dataset, splits_of
from shardprep.formats.shards.manifest import PROVENANCE_NAME, Manifest, read_manifest
from shardprep.formats.shards.read import IN_PLACE, MANIFEST_NAME, OUTPUT_FILES, FileEntry, open_published
from shardprep.formats.sources.source import SourceOptions
from shardprep.formats.storage.store import (
    TRIES,
    WAIT_S,
    AnswerBroken,
    Location,
    RemoteDamaged,
    RemoteFailed,
    RemoteFolder,
    RemoteMissing,
    RetryPolicy,
    StoredFile,
    part_bytes,
)
from shardprep.formats.storage.transfer import FileTransfer, HashedBytes, TransferRun, fill, read_dataset

CLAIM_NAME = f"{WORK_FOLDER_NAME}/upload.json"
JSON_FILES = (MANIFEST_NAME, "upload.json")
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class PublishedDataset:
    """One published dataset.

    Attributes:
        url: Its URL.
        manifest: Its manifest.
        uploaded: Names of the uploaded files.
        kept: Names of the files that were there already, intact.
        already_complete: Whether the manifest was there already.
    """

    url: str
    manifest: Manifest
    uploaded: tuple[str, ...]
    kept: tuple[str, ...]
    already_complete: bool


_md5 = partial(hashlib.md5, usedforsecurity=False)

AT_ONCE = 4
RETRIES = 10
TIMEOUT_S = 120.0  # enough at 0.6 MB/s for the 8 parts that are sent at once


def publish(
    folder: str | os.PathLike[str],
    url: str,
    *,
    at_once: int = AT_ONCE,
    retries: int = RETRIES,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> list[PublishedDataset]:
    """Copy a finished dataset to object storage, every byte verified. After a kill, the same call continues.

    A file is uploaded only if its SHA-256 matches the manifest, and the upload is verified: its ETag must be
    the MD5 of the local file, or, if a store's ETags are not MD5s, it is read back. Intact files in the store
    are kept. The manifest comes last, if there is none, after a final check of all files. So a place never
    holds parts of two datasets: of two uploads of different datasets to one place, one fails. Needs obstore.

    Args:
        folder: A dataset, or a folder of splits, which are published in ``url/<split>``.
        url: A new or empty place, or one where the same call began or finished: ``s3://``, ``gs://``,
            ``az://`` or ``file://``, without user and query. Credentials come from the environment.
        at_once: Number of files to upload at the same time.
        retries: Number of times to retry a failed request.
        timeout_s: Seconds without a response after which a request fails.
        progress: Receives the progress, in bytes; None shows a bar in a notebook.

    Returns:
        The uploaded and kept files of each dataset.

    Raises:
        UsageError: An argument is invalid; PlanMismatch for a place with another dataset.
        ManifestDamaged, ShardDamaged: The local dataset is not finished or not intact.
        RemoteDamaged: A file in the store is still wrong after several uploads.
        OperationError: RemoteFailed or RemoteDenied.
        OSError: A file cannot be read.
    """
    at_once = check_int(at_once, "at_once", least=1)
    place, policy = Location.parse(url), RetryPolicy(retries, timeout_s)
    refuse_unwritable(place)
    source = user_path(folder)
    local = {
        split: (path, read_manifest(path)) for split, path in (splits_of(source) or {"": source}).items()
    }
    for path, manifest in local.values():
        if manifest.archive:
            raise UsageError(
                f"has its images in an archive, beside {MANIFEST_NAME}: copy the archive, and make the same "
                "dataset with prep index",
                path=path,
            )
    with LoopThread(threads=at_once) as loop:
        transfers = TransferRun(loop, at_once, progress_or_bar(progress))
        places = {}
        if "" not in local:
            loop.run(refuse_dataset(place, policy))
        for split, (_, manifest) in local.items():
            remote = RemoteFolder(place.child(split) if split else place, policy, writable=True)
            target = places[split] = StorePlace(remote, canonical_json({"dataset": manifest.root}))
            if not loop.run(target.has_published(manifest)):
                loop.run(target.begin([file.name for file in manifest.files]))
        kept = "files are uploaded"
        return [upload(*local[split], target, transfers, {}, kept=kept) for split, target in places.items()]


def refuse_unwritable(place: Location) -> None:
    """Raise UsageError for a web server, and for a folder in a cache or in the folder of a dataset."""
    if place.scheme in ("http", "https"):
        raise UsageError(
            "is a web server, which accepts no files; give s3://, gs://, az:// or file://", path=place.url
        )
    if (folder := place.folder) is not None:
        refuse_cached(folder)
        refuse_in_dataset(folder)


async def refuse_dataset(place: Location, policy: RetryPolicy) -> None:
    """Raise UsageError if a place for splits holds a dataset, which would hide them."""
    if await RemoteFolder(place, policy, writable=True).content(MANIFEST_NAME, 1) is not None:
        raise UsageError(
            "is itself a dataset, so splits cannot go into it; choose another URL", path=place.url
        )


def upload(
    folder: Path,
    manifest: Manifest,
    place: StorePlace,
    transfers: TransferRun,
    stored: Mapping[str, StoredFile],
    *,
    kept: str = "",
) -> PublishedDataset:
    """Upload the files of the dataset in a folder that are not ``stored`` yet, and publish the manifest."""
    run = transfers.loop.run
    already = run(place.has_published(manifest))
    files = [file for file in manifest.files if file.name not in stored]
    files.sort(key=lambda file: file in manifest.tables)  # tables last
    uploads = [Upload(place.remote, file, folder / file.name) for file in files]
    uploaded, intact = transfers.run("publish", manifest, uploads, kept=kept)
    proven = {**stored, **{each.entry.name: each.stored for each in uploads if each.stored}}
    run(place.finish(manifest, proven))
    run(place.drop_claim())
    return PublishedDataset(place.remote.place.url, manifest, uploaded, intact, already)


@dataclass(frozen=True)
class StorePlace:
    """A folder in a store, and the ``claim`` of the job that fills it.

    The claim is a small file there, equal for equal jobs. Several processes may do the same job.
    """

    remote: RemoteFolder
    claim: bytes

    async def published_manifest(self) -> Manifest | None:
        """Return the published manifest; None if there is none, or a damaged one beside this job's claim.

        Raises the errors of reading one.
        """
        if await self.remote.content(MANIFEST_NAME, 1) is None:
            return None
        try:
            return (await read_dataset(self.remote)).manifest
        except ManifestDamaged:
            if not await self._is_claimed():
                raise
            return None  # its upload was damaged, and the uploader killed before it noticed

    async def has_published(self, manifest: Manifest) -> bool:
        """Whether the manifest is published. Raises PlanMismatch for another one."""
        published = await self.published_manifest()
        if published is not None and published.root != manifest.root:
            raise PlanMismatch("holds another dataset; choose another URL", path=self.remote.place.url)
        return published is not None

    async def begin(self, names: Collection[str]) -> None:
        """Claim the place, or continue. The files ``names`` may be there already.

        Raises PlanMismatch for a place where another dataset is being uploaded, UsageError for one with other
        files or with folders, such as those of splits, RemoteFailed.
        """
        if not await self._is_claimed():
            own = {*names, MANIFEST_NAME, PROVENANCE_NAME, f"{WORK_FOLDER_NAME}/"}
            if others := (await self.remote.list_files()).keys() - own:
                raise UsageError(
                    f"is not empty: {min(others)} does not belong to this dataset; choose another URL",
                    path=self.remote.place.url,
                )
        if not await self.remote.create(CLAIM_NAME, self.claim):
            if not await self._is_claimed():  # a damaged one: its uploader was killed before it verified it
                await self.remote.create(CLAIM_NAME, self.claim, "overwrite")
            await self._is_claimed(needed=True)

    async def finish(self, manifest: Manifest, proven: Mapping[str, StoredFile]) -> None:
        """Publish the manifest if there is none and all ``proven`` files have the same content.

        Another process that does the same job may have written them again. Raises PlanMismatch for another
        manifest or claim; RemoteFailed, also for a changed file.
        """
        if await self.has_published(manifest):  # another process finished the same job
            return
        await self._is_claimed(needed=True)
        files = await self.remote.list_files()
        for file in manifest.files:
            stored = proven[file.name]
            changed = files.get(file.name) != stored and await self.remote.metadata(file.name) != stored
            if changed and await find_intact(self.remote, file) is None:
                raise RemoteFailed(
                    "was changed or removed by another process after it was uploaded; try again",
                    path=self.remote.place.url,
                    shard=file.name,
                )
        data = manifest.to_bytes()
        if not await self.remote.create(MANIFEST_NAME, data) and not await self.has_published(manifest):
            await self.remote.create(MANIFEST_NAME, data, "overwrite")

    async def drop_claim(self) -> None:
        """Remove a claim once the manifest is published, if the store allows that."""
        with suppress(RemoteFailed):
            await self.remote.remove(CLAIM_NAME)
        self._remove_unfinished()

    async def check_sizes(self, manifest: Manifest) -> None:
        """Raise RemoteDamaged unless each file of a published dataset has its size."""
        files = await self.remote.list_files()
        for file in manifest.files:
            if (stored := files.get(file.name)) is None or stored.size != file.size:
                raise RemoteDamaged(
                    "differs from the manifest; publish an intact copy there, or remove it",
                    path=self.remote.place.url,
                    shard=file.name,
                )

    async def _is_claimed(self, *, needed: bool = False) -> bool:
        """Whether this job's claim is there. Raises PlanMismatch for another, or for none if ``needed``."""
        claim = await self.remote.content(CLAIM_NAME, MAX_BYTES)
        if claim != self.claim and (needed or (claim is not None and claim.endswith(b"}\n"))):
            raise PlanMismatch(
                f"another dataset is being uploaded there: finish it, or remove {CLAIM_NAME} and the files "
                "beside it there, or choose another URL",
                path=self.remote.place.url,
            )
        return claim == self.claim

    def _remove_unfinished(self) -> None:
        """Remove temporary files of killed processes from a local folder: obstore's ``NAME#1``."""
        if (folder := self.remote.place.folder) is None:
            return
        work = folder / WORK_FOLDER_NAME
        for path in (*folder.glob("*#*"), *work.glob("*#*")):
            name, _, number = path.name.rpartition("#")
            if number.isdecimal() and (OUTPUT_FILES.fullmatch(name) or name in JSON_FILES):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # it does not exist, or is not empty
            work.rmdir()


@dataclass
class Upload(FileTransfer):
    """The upload of the local file ``path``; ``stored`` is the store's metadata of the verified file."""

    path: Path
    stored: StoredFile | None = None

    async def run(self) -> None:
        """Keep an intact file in the store, or upload it; at most TRIES times.

        It is intact if its ETag is the MD5 of the local file, whose SHA-256 matches the manifest, or if it
        has that SHA-256 when it is read back.
        """
        e_tags = await self._local_e_tags()
        tried, failure = 0, None
        while (found := await find_intact(self.remote, self.entry, e_tags)) is None:
            if tried == TRIES or (failure and not failure.may_pass):
                raise failure or self.remote.not_kept_error(self.entry.name)
            await asyncio.sleep(WAIT_S * tried)
            tried, self.done, failure = tried + 1, 0, None
            try:
                await self.remote.write(self.entry.name, self._sent_parts(), self.entry.size)
            except RemoteFailed as error:  # the file may be there, and only the answer lost
                failure = error
        self.stored, self.is_kept = found, not tried
        self.done, self.is_done = self.entry.size, True

    async def _local_e_tags(self) -> tuple[str, str]:
        """Check the local SHA-256, and return the possible ETags: of a single and of a multipart upload.

        S3, and most compatible stores, return the file's MD5, or for a multipart upload the MD5 of the parts'
        MD5s and their number. Other stores, and buckets with KMS keys, return something else.
        """
        whole, md5, md5_of_parts, count = HashedBytes(), _md5(), _md5(), 0

        def add(part: bytes) -> None:
            whole.append(part)
            md5.update(part)
            md5_of_parts.update(_md5(part).digest())

        async with aclosing(self._parts()) as parts:
            async for part in parts:
                await call_in_thread(add, part)
                count += 1
        if (whole.size, whole.sha256) != (self.entry.size, self.entry.sha256):
            raise ShardDamaged("does not match the manifest; prep repair rebuilds it", path=self.path)
        return md5.hexdigest(), f"{md5_of_parts.hexdigest()}-{count}"

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the local file in parts; a changed length would change the digest."""
        size, offset = min(part_bytes(self.entry.size), self.entry.size + 1), 0
        with open_published(self.path) as descriptor:
            while part := await call_in_thread(read_at, descriptor, size, offset):
                yield part
                offset += len(part)

    async def _sent_parts(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                yield part
                self.done += len(part)


async def find_intact(store: RemoteFolder, file: FileEntry, tags: Collection[str] = ()) -> StoredFile | None:
    """Return the store's metadata of a file if it has one of the ETags, or is intact when read back."""
    stored = await store.metadata(file.name)
    if stored is None or stored.size != file.size:
        return None
    if stored.e_tag not in tags:
        try:
            await fill(store, file, HashedBytes())
        except (AnswerBroken, RemoteDamaged, RemoteMissing):
            return None
    return stored


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
        source, plan_options, options, source_options: As for :func:`~.convert.convert`.
        url: URL of the dataset if ``split`` is given; otherwise, all splits are converted into
            ``url/<split>``. ``s3://``, ``gs://``, ``az://`` or ``file://``.
        scratch: Local folder for the state of the conversion, with room for the tables and one shard more
            than there are workers; give the same folder to continue. None is a folder in the user's cache
            folder, named by the URL.
        split: "train", "val" or "test"; None converts all.
        workers: Number of processes, as for :func:`~.convert.convert`.
        retries: Number of times to retry a failed request.
        timeout_s: Seconds without a response after which a request fails.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The converted splits.

    Raises:
        ShardprepError: The errors of :func:`~.convert.convert` and :func:`~.publish.publish`.
    """
    progress, place = progress_or_bar(progress), Location.parse(url)
    conversion = Conversion(
        source,
        _scratch_folder(place.url) if scratch is None else scratch,
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
    refuse_unwritable(place)
    runner = JobRunner(workers, progress=progress)
    policy = RetryPolicy(retries, timeout_s)
    with LoopThread(threads=AT_ONCE) as loop:
        if split is None:
            loop.run(refuse_dataset(place, policy))

        def convert_one(one: PreparedSplit) -> ConvertedTo:
            remote = RemoteFolder(place if split else place.child(one.listing.split), policy, writable=True)
            to = StorePlace(remote, canonical_json({"plan": sha256_of(one.guard())}))
            done = _convert(one, to, policy, runner, loop)
            with suppress(OSError):  # not empty, or never created
                for folder in dict.fromkeys((one.output, conversion.output)):
                    folder.rmdir()
            return done

        return prepare_and_convert(conversion, progress, convert_one)


def _scratch_folder(url: str) -> Path:
    """Return a folder for this URL in the user's cache folder. Raises OperationError if there can be none."""
    try:
        folder = caches_folder() / "scratch"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        message = f"no folder to build shards in ({error}); name one with --scratch (in Python scratch=)"
        raise OperationError(message) from error
    return folder / hashlib.sha256(url.encode()).hexdigest()[:16]


def _convert(
    prepared: PreparedSplit, place: StorePlace, policy: RetryPolicy, runner: JobRunner, loop: LoopThread
) -> ConvertedTo:
    """Convert a split unless it is published already."""
    url, built = place.remote.place.url, None
    if (manifest := loop.run(place.published_manifest())) is not None:
        prepared.refuse_other_conversion(manifest, url)
        runner.progress.note(f"{url} is complete already")
        loop.run(place.check_sizes(manifest))
        loop.run(place.drop_claim())
    if manifest is None or (prepared.output / WORK_FOLDER_NAME).exists():
        with WorkFolder(prepared.output) as work_folder:
            if manifest is None:
                work_folder.claim(prepared.guard())
                loop.run(place.begin(()))
                builder = partial(_build_and_upload, place.remote.place, policy)
                built = build_shards(prepared, work_folder, runner, builder)
                manifest = publish_tables(work_folder, prepared, built)
                stored = {name: found for shard in built for name, found in shard.stored.items()}
                transfers = TransferRun(loop, AT_ONCE, runner.progress)
                upload(work_folder.output, manifest, place, transfers, stored)
            work_folder.discard(OUTPUT_FILES)
            work_folder.remove()
    return ConvertedTo(url=url, **outcome(prepared, manifest, built))


def _build_and_upload(place: Location, policy: RetryPolicy, job: ShardJob) -> BuiltShard:
    """Build a shard and upload its files, unless they are stored. Safe to kill and repeat.

    A local file is removed once its upload is verified, and in the commit record. A shard whose rows exist
    and whose record matches the stored files is neither built nor uploaded again.
    """
    remote = RemoteFolder(place, policy, writable=True)
    with LoopThread(threads=1) as loop:

        def missing(commit: BuiltShard) -> list[FileEntry]:
            same = {name for name, found in commit.stored.items() if loop.run(remote.metadata(name)) == found}
            return [file for file in commit.files if file.name not in same]

        commit = read_commit(job)
        if commit is None or not all(file.is_in(job.output) for file in missing(commit)):
            commit = build_shard(job)
        for file in missing(commit):
            sent = Upload(remote, file, job.output / file.name)
            loop.run(sent.run())
            if sent.stored:
                stored = {**commit.stored, file.name: sent.stored}
                commit = write_commit(job, replace(commit, stored=stored))
    for file in commit.files:
        (job.output / file.name).unlink(missing_ok=True)
    return commit
