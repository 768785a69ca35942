"""One file of a dataset: kept where it is right, else downloaded and verified before it has its name."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.errors import DataError, ShardprepError
from shardprep.formats.processes.loop_thread import in_thread
from shardprep.formats.system.storage.failures import AnswerBroken, RangeRefused
from shardprep.formats.system.storage.remote_folder import RemoteFolder

from .part_file import HashedFile, PartFile

TRIES = 4
WAIT_S = 0.1  # after the first failure; longer after each


class RemoteDamaged(DataError):
    """What a bucket or a server sends is not the file that the manifest lists."""


@dataclass
class Download:
    """The copy of one file. ``done`` are its bytes that are there; ``is_kept`` says that it was there before.

    ``part`` is the file's path until it is complete and right, and ``final`` the one afterwards.
    """

    remote: RemoteFolder
    entry: FileEntry
    final: Path
    part: Path
    done: int = 0
    is_kept: bool = False
    is_done: bool = False

    async def run(self) -> None:
        """Keep the file that is there if it is right; otherwise download it, anew at most TRIES times.

        Raises RemoteDamaged if it is never right, RemoteMissing, RemoteFailed, and OSError.
        """
        self.is_kept = await self._is_right()
        if not self.is_kept:
            with closing(PartFile(self.part)) as part:
                await self._hash(part)
                await self._fill(part)
                await in_thread(part.publish, self.final)
        self.is_done = True

    async def _is_right(self) -> bool:
        """Whether a file of that name is there, with the size and the digest that the manifest lists."""
        try:
            found = HashedFile(self.final)
        except FileNotFoundError:
            return False
        with closing(found):
            if found.size_on_disk == self.entry.size:
                await self._hash(found)
                return found.sha256 == self.entry.sha256
            return False

    async def _hash(self, file: HashedFile) -> None:
        while await in_thread(file.hash_next):
            self.done = min(file.size, self.entry.size)

    async def _fill(self, part: PartFile) -> None:
        """Download what is missing, until the part is the whole file."""
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
                await in_thread(part.append, chunk[: self.entry.size + 1 - part.size])
                self.done = min(part.size, self.entry.size)
                if part.size > self.entry.size:
                    return

    async def _drop(self, part: PartFile) -> None:
        await in_thread(part.clear)
        self.done = 0
