"""The job that builds one shard, brings it into a store, and removes the local file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.conversion.building.build_shard import ShardJob, committed
from shardprep.formats.conversion.building.built_shard import BuiltShard
from shardprep.formats.conversion.building.plan import PlannedShard
from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RetryPolicy
from shardprep.formats.system.storage.writable_folder import WritableFolder

from .receipts import Receipts
from .upload import Upload


@dataclass(frozen=True)
class StoredShardJob:
    """A shard's ``job``, and the ``place`` that its files are brought to. Picklable.

    A file is removed here when it is proven there, after a receipt of that. A shard of which the rows and the
    receipts are here, and the files as these say there, is neither built nor uploaded again.
    """

    job: ShardJob
    place: Location
    policy: RetryPolicy

    @property
    def output(self) -> Path:
        return self.job.output

    @property
    def shard(self) -> PlannedShard:
        return self.job.shard

    @property
    def decodes(self) -> bool:
        return self.job.decodes

    def key_at(self, place: int) -> str:
        """Return the key of the entry at that place, or of the last one."""
        return self.job.key_at(place)

    def decode(self, place: int) -> None:
        """Decode one image, in a process that may crash, unless it is known to. Raises BadImage."""
        self.job.decode(place)

    def crashed(self, place: int, signal: str) -> StoredShardJob:
        """Return the job with an image that crashes the decoder by that signal."""
        return replace(self, job=self.job.crashed(place, signal))

    def build(self) -> BuiltShard:
        """Build the shard if its files are not there, and bring them there. Safe to kill and repeat.

        Raises what :meth:`.ShardJob.build` and :meth:`.Upload.run` raise.
        """
        with LoopThread(threads=1) as loop:
            remote = WritableFolder(self.place, self.policy)
            commit = committed(self.job)
            missing = (
                [file for file in commit.files if not loop.run(self._is_stored(remote, file))]
                if commit
                else []
            )
            if commit is None or not all(file.is_in(self.output) for file in missing):
                commit = self.job.build()
                missing = [file for file in commit.files if not loop.run(self._is_stored(remote, file))]
            for file in missing:
                upload = Upload(remote, file, self.output / file.name)
                loop.run(upload.run())
                if upload.stored:
                    self._receipts.write(file, upload.stored, self.job.run)
        for file in commit.files:
            with suppress(FileNotFoundError):
                (self.output / file.name).unlink()
        return commit

    @property
    def _receipts(self) -> Receipts:
        return Receipts(self.job.work_folder)

    async def _is_stored(self, remote: WritableFolder, file: FileEntry) -> bool:
        receipt = self._receipts.of(file)
        return receipt is not None and await remote.about(file.name) == receipt
