"""The running of transfers, one for each file of a dataset, with their progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.processes.loop_thread import LoopThread, Running, run_all
from shardprep.formats.progress import Progress, tell_shards


class FileTransfer(Running, Protocol):
    """A file on its way: ``done`` bytes are there; ``is_done`` once all are, and right."""

    entry: FileEntry
    done: int
    is_done: bool


@dataclass(frozen=True)
class TransferRun:
    """How transfers run: ``at_once`` of them at the same time, in an event loop."""

    loop: LoopThread
    at_once: int
    progress: Progress

    def run(self, verb: str, manifest: Manifest, transfers: Sequence[FileTransfer]) -> None:
        """Run the transfers of a dataset's files. The first failure cancels the others, and is raised."""
        names = {shard.name for shard in manifest.shards}
        shards, told = [each for each in transfers if each.entry.name in names], 0

        def tick() -> None:
            nonlocal told
            self.progress.at(0, sum(each.done for each in transfers))
            if (done := sum(each.is_done for each in shards)) > told:
                told = done
                tell_shards(self.progress, done, len(shards))

        size = sum(each.entry.size for each in transfers)
        with self.progress.task(f"{verb} {manifest.split}", records=0, size=size):
            self.loop.run(run_all(transfers, self.at_once), tick)
