"""The place of one dataset in a store: claimed, filled with proven files, and published by its manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardprep.formats.dataset.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, PROVENANCE_NAME, Manifest
from shardprep.formats.dataset.remote.fetching.transfer import RemoteDamaged
from shardprep.formats.errors import ManifestDamaged, PlanMismatch, UsageError
from shardprep.formats.system.storage.stored_file import StoredFile
from shardprep.formats.system.storage.writable_folder import WritableFolder

from .claim import Claim
from .small_file import created


@dataclass(frozen=True)
class StorePlace:
    """A folder in a store, and the claim of the work that fills it."""

    remote: WritableFolder
    claim: Claim

    async def published(self) -> Manifest | None:
        """Return the manifest that is there, None without one. Raises ManifestDamaged, UnknownVersion."""
        data = await self.remote.content(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)
        if data is None:
            return None
        try:
            return Manifest.parse(data)
        except ManifestDamaged as error:
            error.path, error.shard = self.remote.place.url, MANIFEST_NAME
            raise

    async def begin(self, names: Collection[str]) -> None:
        """Claim the place. ``names`` are those of files that may lie there already.

        Raises PlanMismatch for a place where another dataset is uploaded, UsageError for one with other
        files, RemoteFailed.
        """
        if not await self.claim.is_held():
            others = (await self.remote.files()).keys() - {*names, MANIFEST_NAME, PROVENANCE_NAME}
            if others:
                raise UsageError(
                    f"is not empty: {min(others)} is no file of this dataset; choose another place",
                    path=self.remote.place.url,
                )
        await self.claim.take()
        if await self.published() is not None:  # another process has finished since: the caller looks again
            await self.claim.drop()

    async def _check(self, proven: Mapping[str, StoredFile]) -> None:
        """Raise RemoteDamaged unless all that was proven is still there; PlanMismatch without the claim."""
        await self.claim.check()
        files = await self.remote.files()
        for name, stored in proven.items():
            if files.get(name) != stored and await self.remote.about(name) != stored:
                raise RemoteDamaged(
                    "was changed or removed after it was uploaded; run the same command again",
                    path=self.remote.place.url,
                    shard=name,
                )

    async def finish(self, data: bytes, proven: Mapping[str, StoredFile]) -> None:
        """Publish the manifest if there is none and all files are as they were ``proven``; drop the claim.

        Raises PlanMismatch for another manifest or claim, RemoteDamaged for a changed file, RemoteFailed.
        """
        try:
            await self._check(proven)
        except PlanMismatch:
            if await self._manifest_bytes() == data:  # the same work ended in another process
                return
            raise
        if not await created(self.remote, MANIFEST_NAME, data) and await self._manifest_bytes() != data:
            raise self.taken()
        await self.claim.drop()

    async def check_sizes(self, manifest: Manifest) -> None:
        """Raise RemoteDamaged unless each file of a published dataset is there, with its size."""
        files = await self.remote.files()
        for file in manifest.files:
            if (stored := files.get(file.name)) is None or stored.size != file.size:
                raise RemoteDamaged(
                    "is not as the manifest lists it; publish an intact copy there, or remove what is there",
                    path=self.remote.place.url,
                    shard=file.name,
                )

    def taken(self) -> PlanMismatch:
        """Return the error for a place with another dataset."""
        return PlanMismatch("holds another dataset; choose another place", path=self.remote.place.url)

    async def _manifest_bytes(self) -> bytes | None:
        return await self.remote.content(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)
