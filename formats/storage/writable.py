"""A folder in object storage that files are written to, through obstore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.files import flush_file
from shardprep.formats.storage.store import Location, RemoteFolder, RemoteMissing, RetryPolicy, translated

if TYPE_CHECKING:
    from obstore.store import ObjectStore


MEBIBYTE = 1 << 20
PART_BYTES = 8 * MEBIBYTE  # of a file that is sent in parts; a slow line sends one within the timeout
MOST_PARTS = 10_000  # of one file, which S3 allows
PARTS_AT_ONCE = 2  # of one file: several files are sent at once


class WritableFolder(RemoteFolder):
    """A folder that files are read from and written to. A file is there as a whole or not at all.

    A folder of this machine is made where it is missing, and its files are flushed. Raises what
    :class:`RemoteFolder` raises; UsageError for a web server.
    """

    def __init__(self, place: Location, policy: RetryPolicy) -> None:
        refuse_server(place)
        super().__init__(place, policy)

    def _local(self, folder: Path) -> ObjectStore:
        from obstore.store import LocalStore  # start-up time, and the package is an extra

        folder.mkdir(parents=True, exist_ok=True)  # errors of obstore lack the path
        with translated(self.place):
            return LocalStore(folder, automatic_cleanup=True)

    def _config(self) -> Any:
        # not every store with the interface of S3 knows the request that deletes many files
        return super()._config() | ({"disable_bulk_delete": True} if self.place.scheme == "s3" else {})

    async def content(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of a file, None if it is not there. Raises RemoteFailed."""
        data = bytearray()
        try:
            async with aclosing(self.read(name)) as chunks:
                async for chunk in chunks:
                    data += chunk
                    if len(data) >= most:
                        break
        except RemoteMissing:
            return None
        return bytes(data[:most])

    async def create(self, name: str, data: bytes) -> bool:
        """Write a file only if there is none of that name; return whether it was written. Of several
        processes that do so at once, one gets True.
        """
        import obstore  # as above

        with translated(self.place, name):
            try:
                await obstore.put_async(self._store, name, data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return False
        await self._flush(name)
        return True

    async def write(self, name: str, parts: AsyncGenerator[bytes, None], size: int) -> None:
        """Write a file of ``size`` bytes, in place of any other of that name.

        ``parts`` are its bytes, each of them :func:`part_bytes` long but the last.
        """
        import obstore  # as above

        bytes_of_part = part_bytes(size)
        with translated(self.place, name):
            async with aclosing(parts):
                if size <= bytes_of_part:
                    whole = b"".join([part async for part in parts])
                    await obstore.put_async(self._store, name, whole, use_multipart=False)
                else:
                    await obstore.put_async(
                        self._store, name, parts, chunk_size=bytes_of_part, max_concurrency=PARTS_AT_ONCE
                    )
        await self._flush(name)

    async def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        import obstore  # as above

        try:
            with translated(self.place, name):
                await obstore.delete_async(self._store, name)
        except RemoteMissing:
            return

    async def _flush(self, name: str) -> None:
        if (folder := self.place.folder) is not None:
            for path in (folder / name, (folder / name).parent):
                await asyncio.get_running_loop().run_in_executor(None, flush_file, path)


def refuse_server(place: Location) -> None:
    """Raise UsageError for a place on a web server."""
    if place.scheme in ("http", "https"):
        raise UsageError(
            "is a web server, which accepts no files; give s3://, gs://, az:// or file://", path=place.url
        )


def part_bytes(size: int) -> int:
    """Return the size of the parts that a file of that size is sent in; the last may be smaller.

    >>> part_bytes(1 << 30) >> 20, part_bytes(200 << 30) >> 20
    (8, 21)
    """
    return max(PART_BYTES, -(-size // (MOST_PARTS * MEBIBYTE)) * MEBIBYTE)
