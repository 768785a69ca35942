"""Small files in a store that are written only if they are not there, and read back."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from shardprep.formats.dataset.remote.fetching.transfer import TRIES, RemoteDamaged
from shardprep.formats.system.storage.writable_folder import WritableFolder


async def created(remote: WritableFolder, name: str, data: bytes) -> bool:
    """Write a file if there is none of that name, and read it back; return whether this call wrote it.

    Raises RemoteDamaged if it is not right after several writes, RemoteFailed.
    """
    if not await remote.create(name, data):
        return False
    for _ in range(TRIES):
        if await remote.content(name, len(data) + 1) == data:
            return True
        await remote.write(name, _whole(data), len(data))
    raise RemoteDamaged(
        f"has not the bytes that were sent, each of {TRIES} times", path=remote.place.url, shard=name
    )


async def _whole(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data
