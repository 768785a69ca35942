"""One file of a dataset: kept in the store if it is right there, else uploaded, and proven there."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry, published_file
from shardprep.formats.dataset.remote.fetching.transfer import TRIES, WAIT_S, RemoteDamaged
from shardprep.formats.errors import ShardDamaged
from shardprep.formats.processes.loop_thread import in_thread
from shardprep.formats.system.positional import read_at
from shardprep.formats.system.storage.failures import AnswerBroken, RemoteMissing
from shardprep.formats.system.storage.stored_file import StoredFile
from shardprep.formats.system.storage.writable_folder import WritableFolder, part_bytes

from .fingerprint import Fingerprint


@dataclass
class Upload:
    """The copy of the local file ``path`` in a store.

    ``done`` are its bytes that are sent; ``is_kept`` says that it was there before, and ``stored`` what the
    store says of the file that is proven to be right.
    """

    remote: WritableFolder
    entry: FileEntry
    path: Path
    done: int = 0
    is_kept: bool = False
    is_done: bool = False
    stored: StoredFile | None = None

    async def run(self) -> None:
        """Keep the file that is there if it is right; otherwise upload it, anew at most TRIES times.

        It is right if its ETag is the MD5 of the local file, of which the SHA-256 is that in the manifest;
        where an ETag is no MD5, it is read back, and has the SHA-256. Raises ShardDamaged for a local file
        that is not the one in the manifest, RemoteDamaged if the stored one is never right, RemoteFailed,
        OSError.
        """
        local = await self._local_fingerprint()
        self.is_kept = await self._is_right(local)
        for tried in range(TRIES):
            if self.stored is not None:
                break
            await asyncio.sleep(WAIT_S * tried)
            self.done = 0
            await self.remote.write(self.entry.name, self._sent(), self.entry.size)
            await self._is_right(local)
        if self.stored is None:
            raise RemoteDamaged(
                f"has not the bytes that were sent, each of {TRIES} times; look at what lies between here and "
                "the store",
                path=self.remote.place.url,
                shard=self.entry.name,
            )
        self.done, self.is_done = self.entry.size, True

    async def _local_fingerprint(self) -> Fingerprint:
        found = Fingerprint()
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                await in_thread(found.add, part)
        if (found.size, found.sha256) != (self.entry.size, self.entry.sha256):
            raise ShardDamaged("is not the file that was published; prep repair rebuilds it", path=self.path)
        return found

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the local file, of which a changed length is found by the digest."""
        size, offset = min(part_bytes(self.entry.size), self.entry.size + 1), 0
        with published_file(self.path) as descriptor:
            while part := await in_thread(read_at, descriptor, size, offset):
                yield part
                offset += len(part)

    async def _sent(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                yield part
                self.done += len(part)

    async def _is_right(self, local: Fingerprint) -> bool:
        """Whether the store has the file; ``stored`` is set if it has."""
        found = await self.remote.about(self.entry.name)
        if found is None or found.size != self.entry.size:
            return False
        if found.e_tag not in local.e_tags and await self._sha256_there() != self.entry.sha256:
            return False
        self.stored = found
        return True

    async def _sha256_there(self) -> str:
        """Return the digest of the file that the store sends; empty where it breaks off or is gone."""
        digest = hashlib.sha256()
        try:
            async with aclosing(self.remote.read(self.entry.name)) as chunks:
                async for chunk in chunks:
                    await in_thread(digest.update, chunk)
        except (AnswerBroken, RemoteMissing):
            return ""
        return f"sha256:{digest.hexdigest()}"
