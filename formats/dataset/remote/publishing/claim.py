"""The claim on a place in a store: one dataset at a time is uploaded to it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME
from shardprep.formats.errors import PlanMismatch
from shardprep.formats.system.storage.failures import RemoteFailed
from shardprep.formats.system.storage.writable_folder import WritableFolder

from .small_file import created

CLAIM_NAME = f"{WORK_FOLDER_NAME}/upload.json"
MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Claim:
    """A small file in the store that says what is uploaded there, in ``data``; equal work has equal bytes.

    Several processes may do the same work: each brings the same bytes.
    """

    remote: WritableFolder
    data: bytes

    async def is_held(self) -> bool:
        """Whether this work was begun there before. Raises PlanMismatch for other work; RemoteFailed."""
        found = await self.remote.content(CLAIM_NAME, MOST_BYTES)
        if found not in (None, self.data):
            raise self._mismatch()
        return found is not None

    async def take(self) -> None:
        """Begin this work there, or go on with it. Raises PlanMismatch for other work; RemoteFailed."""
        if not await created(self.remote, CLAIM_NAME, self.data):
            await self.check()

    async def check(self) -> None:
        """Raise PlanMismatch if the place is not claimed for this work any more; RemoteFailed."""
        if not await self.is_held():
            raise self._mismatch()

    async def drop(self) -> None:
        """Remove the claim after the manifest is there. Where that is not allowed, it stays."""
        with suppress(RemoteFailed):
            await self.remote.remove(CLAIM_NAME)

    async def drop_leftover(self) -> None:
        """Remove the claim that this work left when it ended before :meth:`drop`. Raises RemoteFailed."""
        with suppress(PlanMismatch):  # that of other work, which will be refused
            if await self.is_held():
                await self.drop()

    def _mismatch(self) -> PlanMismatch:
        return PlanMismatch(
            f"another dataset is being uploaded there: finish that, or remove {CLAIM_NAME} there and the files "
            "beside it, or choose another place",
            path=self.remote.place.url,
        )
