"""The uploading of one or several datasets, each file by an upload of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.dataset.remote.fetching.transfer_run import TransferRun
from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.progress import Progress
from shardprep.formats.records.canonical_json import canonical_json
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RetryPolicy
from shardprep.formats.system.storage.writable_folder import WritableFolder

from .claim import Claim
from .published_dataset import PublishedDataset
from .store_place import StorePlace
from .upload import Upload


def published_datasets(
    local: Mapping[Location, tuple[Path, Manifest]],
    policy: RetryPolicy,
    *,
    at_once: int,
    progress: Progress,
) -> list[PublishedDataset]:
    """Publish each dataset at its place, as :func:`~.publish.publish` does."""
    with LoopThread(threads=at_once) as loop:
        transfers = TransferRun(loop, at_once, progress)
        works = [_Publishing(place, policy, *one, transfers) for place, one in local.items()]
        for work in works:
            work.begin()
        return [work.published() for work in works]


@dataclass(frozen=True)
class _Publishing:
    """The publishing of one dataset in a folder."""

    where: Location
    policy: RetryPolicy
    folder: Path
    manifest: Manifest
    transfers: TransferRun

    @property
    def place(self) -> StorePlace:
        remote = WritableFolder(self.where, self.policy)
        return StorePlace(remote, Claim(remote, canonical_json({"dataset": self.manifest.root})))

    def begin(self) -> None:
        """Claim the place, unless the dataset is published there."""
        place, run = self.place, self.transfers.loop.run
        if not self._is_published(place):
            run(place.begin([file.name for file in self.manifest.files]))

    def published(self) -> PublishedDataset:
        """Upload what is missing, and publish the manifest."""
        place, run = self.place, self.transfers.loop.run
        already = self._is_published(place)
        files = sorted(self.manifest.files, key=lambda file: file in self.manifest.tables)  # these last
        uploads = [Upload(place.remote, file, self.folder / file.name) for file in files]
        self.transfers.run("publish", self.manifest, uploads)
        if already:
            run(place.claim.drop_leftover())
        else:
            proven = {each.entry.name: each.stored for each in uploads if each.stored}
            run(place.finish(self.manifest.to_bytes(), proven))
        names = {
            kept: tuple(each.entry.name for each in uploads if each.is_kept == kept) for kept in (True, False)
        }
        return PublishedDataset(self.where.url, self.manifest, names[False], names[True], already)

    def _is_published(self, place: StorePlace) -> bool:
        """Whether this dataset has its manifest there. Raises PlanMismatch for another one."""
        found = self.transfers.loop.run(place.published())
        if found is not None and found.root != self.manifest.root:
            raise place.taken()
        return found is not None
