"""The copy of one dataset in a folder: what is there, what is to be fetched, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.formats.containers.published_file import FileEntry, read_small
from shardprep.formats.conversion.building.work_folder import WorkFolder, refuse_busy, refuse_other_plan
from shardprep.formats.conversion.preflight import check_output
from shardprep.formats.dataset.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, WORK_FOLDER_NAME, Manifest
from shardprep.formats.errors import PlanMismatch, UsageError
from shardprep.formats.system.atomic_write import publish_bytes

from .download import Download
from .remote_dataset import RemoteDataset

WORK = "a fetch"


@dataclass(frozen=True)
class LocalCopy:
    """A remote dataset and the folder for it; ``shards`` are the numbers of those to fetch, None for all."""

    remote: RemoteDataset
    output: Path
    shards: Sequence[int] | None

    @property
    def manifest(self) -> Manifest:
        return self.remote.manifest

    @property
    def guard(self) -> dict[str, Any]:
        """What an unfinished copy must have been begun with."""
        return {"dataset": self.manifest.root}

    @property
    def url(self) -> str:
        return self.remote.folder.place.url

    def check(self) -> None:
        """Raise UsageError for another output than an empty one or this dataset's; OutputBusy; OSError."""
        self.remote.refuse_archive()
        self._check_shards()
        refuse_busy(self.output)
        if not (self.output / MANIFEST_NAME).exists():
            check_output(self.output, work=WORK)
            refuse_other_plan(self.output, self.guard, work="fetch")
        elif read_small(self.output / MANIFEST_NAME, MAX_MANIFEST_BYTES) != self.remote.data:
            raise PlanMismatch(
                "holds another dataset than is there now, or a damaged manifest.json; choose another folder, or "
                "remove this one",
                path=self.output,
            )

    def _check_shards(self) -> None:
        count = len(self.manifest.shards)
        if wrong := [number for number in self.shards or () if not 0 <= number < count]:
            raise UsageError(f"has the shards 0 to {count - 1}, and not {wrong[0]}", path=self.url)
        if self.shards is not None and not len(self.shards):
            raise UsageError("no shard is asked for", path=self.url)

    @property
    def wanted(self) -> tuple[FileEntry, ...]:
        """The files to fetch: tables first; all where the others are there, since they end the copy."""
        chosen = self._chosen()
        names = {file.name for file in chosen}
        others = [file for file in self.manifest.files if file.name not in names]
        return chosen if any(self._is_missing(file) for file in others) else (*chosen, *others)

    def _chosen(self) -> tuple[FileEntry, ...]:
        manifest = self.manifest
        numbers = range(len(manifest.shards)) if self.shards is None else sorted(set(self.shards))
        columns = manifest.columns.entries if manifest.columns else ()
        tables = [*manifest.tables, *(column.table for column in columns)]
        sharded = [manifest.shards, *(column.shards for column in columns if column.shards)]
        return (*tables, *(shards[number] for number in numbers for shards in sharded))

    def _is_missing(self, file: FileEntry) -> bool:
        try:
            return (self.output / file.name).stat().st_size != file.size
        except FileNotFoundError:
            return True

    def bytes_to_write(self) -> int:
        """Return about how many bytes are still to be written."""
        return sum(file.size - self._part_bytes(file) for file in self.wanted if self._is_missing(file))

    def _part_bytes(self, file: FileEntry) -> int:
        try:
            return min(self.part_of(file).stat().st_size, file.size)
        except FileNotFoundError:
            return 0

    def part_of(self, file: FileEntry) -> Path:
        """Return the path of a file that is not complete: named by its digest, which is what it will have."""
        return self.output / WORK_FOLDER_NAME / f"{file.sha256.removeprefix('sha256:')}-{file.name}.part"

    def downloads(self) -> list[Download]:
        """Return the downloads of the files to fetch."""
        folder = self.remote.folder
        return [Download(folder, file, self.output / file.name, self.part_of(file)) for file in self.wanted]

    def kept(self) -> str:
        """Return how many files are there, of how many; empty if none is."""
        done = sum(not self._is_missing(file) for file in self.manifest.files)
        return f"{done} of {len(self.manifest.files)} files are fetched" if done else ""

    def finish(self, work_folder: WorkFolder, fetched: Sequence[Download]) -> bool:
        """Publish the manifest if all files are there and right; return whether they are."""
        if len(fetched) < len(self.manifest.files):
            return False
        if not (self.output / MANIFEST_NAME).exists():
            publish_bytes(self.output / MANIFEST_NAME, self.remote.data, work_folder.run)
        work_folder.remove()
        return True
