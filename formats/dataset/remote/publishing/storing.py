"""The conversion of one split into a store: its shards, its tables, and its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.conversion.building.build_shard import ShardJob
from shardprep.formats.conversion.building.built_shard import BuiltShard
from shardprep.formats.conversion.building.progress_counters import ProgressCounters
from shardprep.formats.conversion.building.work_folder import WorkFolder
from shardprep.formats.conversion.convert import build_shards
from shardprep.formats.conversion.finalize import gather
from shardprep.formats.conversion.preparation import ConvertOptions, Prepared
from shardprep.formats.conversion.running.job_runner import run_jobs
from shardprep.formats.conversion.skipped import sum_up
from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME, Manifest
from shardprep.formats.dataset.remote.fetching.transfer_run import TransferRun
from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.progress import Progress
from shardprep.formats.records.canonical_json import canonical_json, sha256_of
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RetryPolicy
from shardprep.formats.system.storage.stored_file import StoredFile
from shardprep.formats.system.storage.writable_folder import WritableFolder

from .claim import Claim
from .converted_to import ConvertedTo
from .receipts import Receipts
from .store_place import StorePlace
from .stored_shard_job import StoredShardJob
from .upload import Upload

TABLES_AT_ONCE = 4


@dataclass(frozen=True)
class Storing:
    """What is the same for every split. ``scratch`` has the folders in which splits are built, or is one."""

    scratch: Path
    policy: RetryPolicy
    options: ConvertOptions
    workers: int | None
    progress: Progress

    def converted(self, prepared: Prepared, where: Location) -> ConvertedTo:
        """Convert a split, unless it is there already."""
        remote = WritableFolder(where, self.policy)
        claim = Claim(remote, canonical_json({"plan": sha256_of(prepared.guard())}))
        with LoopThread(threads=TABLES_AT_ONCE) as loop:
            work = _StoredSplit(self, prepared, StorePlace(remote, claim), loop)
            return work.converted()


@dataclass(frozen=True)
class _StoredSplit:
    """One split, and the place for it."""

    storing: Storing
    prepared: Prepared
    place: StorePlace
    loop: LoopThread

    @property
    def _url(self) -> str:
        return self.place.remote.place.url

    def converted(self) -> ConvertedTo:
        if (found := self.loop.run(self.place.published())) is not None:
            return self._already_there(found)
        with WorkFolder(self.prepared.output) as work_folder:
            if self.storing.options.restart:
                work_folder.discard()
            work_folder.claim(self.prepared.guard())
            self.loop.run(self.place.begin(()))
            if (found := self.loop.run(self.place.published())) is None:
                return self._converted(work_folder)
        return self._already_there(found)

    def _converted(self, work_folder: WorkFolder) -> ConvertedTo:
        prepared, progress = self.prepared, self.storing.progress
        built = build_shards(prepared, work_folder, self._run, progress)
        manifest = gather(work_folder, prepared.planned, prepared.listing, built, prepared.boxes)
        proven = self._stored(work_folder, built) | self._with_tables(manifest, built)
        self.loop.run(self.place.finish(manifest.to_bytes(), proven))
        work_folder.discard()
        work_folder.remove()
        self._remove_scratch()
        images = [image for shard in built for image in shard.skipped]
        skipped = sum_up(images, prepared.planned.entries, prepared.listing.labels)
        return ConvertedTo(
            self._url, manifest, already_complete=False, skipped=skipped, ignored=prepared.listing.ignored
        )

    def _run(self, jobs: Iterable[ShardJob], counters: ProgressCounters) -> list[BuiltShard]:
        where, policy = self.place.remote.place, self.storing.policy
        stored = (StoredShardJob(job, where, policy) for job in jobs)
        return run_jobs(stored, counters, workers=self.storing.workers, progress=self.storing.progress)

    def _stored(self, work_folder: WorkFolder, built: Sequence[BuiltShard]) -> dict[str, StoredFile]:
        receipts = Receipts(work_folder.folder)
        files = [file for shard in built for file in shard.files]
        return {file.name: stored for file in files if (stored := receipts.of(file))}

    def _with_tables(self, manifest: Manifest, built: Sequence[BuiltShard]) -> dict[str, StoredFile]:
        """Upload what is no shard's; return what the store says of it."""
        sharded = {file.name for shard in built for file in shard.files}
        remote, folder = self.place.remote, self.prepared.output
        uploads = [
            Upload(remote, each, folder / each.name) for each in manifest.files if each.name not in sharded
        ]
        TransferRun(self.loop, TABLES_AT_ONCE, self.storing.progress).run("publish", manifest, uploads)
        return {each.entry.name: each.stored for each in uploads if each.stored}

    def _already_there(self, manifest: Manifest) -> ConvertedTo:
        """Return the finished dataset. Raises PlanMismatch for another plan, RemoteDamaged."""
        self.prepared.refuse_other(manifest, self._url)
        self.storing.progress.note(f"{self._url} is complete already")
        self.loop.run(self.place.check_sizes(manifest))
        self.loop.run(self.place.claim.drop_leftover())
        if (self.prepared.output / WORK_FOLDER_NAME).exists():
            with WorkFolder(self.prepared.output) as work_folder:
                work_folder.discard()
                work_folder.remove()
        self._remove_scratch()
        return ConvertedTo(self._url, manifest, already_complete=True, ignored=self.prepared.listing.ignored)

    def _remove_scratch(self) -> None:
        with suppress(OSError):  # it is not empty, or never was
            for folder in dict.fromkeys((self.prepared.output, self.storing.scratch)):
                folder.rmdir()
