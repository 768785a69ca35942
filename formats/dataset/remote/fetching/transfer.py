"""The bytes of one remote file, asked for until they are those that the manifest lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.errors import DataError, ShardprepError
from shardprep.formats.processes.loop_thread import in_thread
from shardprep.formats.system.storage.failures import AnswerBroken, RangeRefused
from shardprep.formats.system.storage.remote_folder import RemoteFolder

from .part_file import PartFile

TRIES = 4
WAIT_S = 0.1  # after the first failure; longer after each


class RemoteDamaged(DataError):
    """What a bucket or a server sends is not the file that the manifest lists."""


@dataclass
class Transfer:
    """The receiving of one file into a part. ``done`` are its bytes that are there.

    ``arrived`` is called with the number of bytes of each piece, also of those that are not kept.
    """

    remote: RemoteFolder
    entry: FileEntry
    done: int = field(default=0, kw_only=True)
    arrived: Callable[[int], object] = field(default=lambda size: None, kw_only=True)

    async def fill(self, part: PartFile) -> None:
        """Download what is missing, until the part is the whole file; anew at most TRIES times.

        Raises RemoteDamaged if it is never right, RemoteMissing, RemoteFailed, and OSError.
        """
        for tried in range(1, TRIES + 1):
            failure = await self._failure(part)
            if failure is None:
                return
            if tried == TRIES:
                raise failure
            await asyncio.sleep(WAIT_S * tried)

    async def _failure(self, part: PartFile) -> ShardprepError | None:
        """Download what is missing, and return what is wrong; bytes that may be right are kept."""
        try:
            await self._receive(part)
        except AnswerBroken as error:
            return error
        if part.size == self.entry.size and part.sha256 == self.entry.sha256:
            return None
        return await self._damage(part)

    async def _damage(self, part: PartFile) -> RemoteDamaged:
        size, wanted = part.size, self.entry.size
        if size < wanted:
            cause = f"ends after {size:,} of {wanted:,} bytes"
        else:
            cause = f"has more than {wanted:,} bytes" if size > wanted else "has another SHA-256"
            await self._drop(part)
        return RemoteDamaged(
            f"is not the file that the manifest lists: it {cause}, each of {TRIES} times; publish it there again",
            path=self.remote.place.url,
            shard=self.entry.name,
        )

    async def _receive(self, part: PartFile) -> None:
        """Append what the server sends, to one byte beyond the size at most."""
        if part.size > self.entry.size:
            await self._drop(part)
        try:
            await self._append_from(part)
        except RangeRefused:
            if not part.size:
                raise
            await self._drop(part)
            await self._append_from(part)

    async def _append_from(self, part: PartFile) -> None:
        if part.size == self.entry.size:
            return
        async with aclosing(self.remote.read(self.entry.name, part.size)) as chunks:
            async for chunk in chunks:
                self.arrived(len(chunk))
                await in_thread(part.append, chunk[: self.entry.size + 1 - part.size])
                self.done = min(part.size, self.entry.size)
                if part.size > self.entry.size:
                    return

    async def _drop(self, part: PartFile) -> None:
        await in_thread(part.clear)
        self.done = 0
