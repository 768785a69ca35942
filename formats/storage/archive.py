"""An archive in object storage, read in place by offset, which must not change."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.owners import Owner
from shardprep.formats.storage.store import (
    PATIENT,
    Location,
    OtherFile,
    RangeRefused,
    RemoteFolder,
    StoredFile,
)


@dataclass(frozen=True)
class RemoteFile:
    """The file ``name`` at a place, as it was when the place was listed. Picklable."""

    place: Location
    name: str
    stored: StoredFile

    @property
    def url(self) -> str:
        return f"{self.place.url}/{self.name}"


HEADERS_AT_ONCE = 64
AHEAD_AT_ONCE = 32
AHEAD_BYTES = 64 << 20
PIECE_BYTES = 4 << 20  # of a file that is read whole

Item = TypeVar("Item")
Result = TypeVar("Result")


class RemoteArchive(Owner, AbstractContextManager["RemoteArchive"]):
    """A file open for reading by ranges, like :class:`.ArchiveFile`. Thread-safe.

    Entering and leaving raise SourceDamaged if the file is not the one that was listed. A response from
    another file, or of the wrong length, is requested again.
    """

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self.path = file.url
        self._expected: deque[tuple[int, int]] = deque()
        self._ahead: deque[tuple[tuple[int, int], Future[bytes]]] = deque()
        self._is_stopped = False

    def __enter__(self) -> RemoteArchive:
        """Open the file. Raises SourceDamaged, RemoteFailed, and OperationError if obstore is missing."""
        self._folder = RemoteFolder(self.file.place, PATIENT)
        self._loop = LoopThread(threads=1).__enter__()
        try:
            self._loop.run(self._refuse_changed())
        except BaseException:
            self._loop.__exit__()  # not when the error is dropped, which may be kept for long
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._loop.cancel()
            if kind is None:
                self._loop.run(self._refuse_changed())
        finally:
            self._loop.__exit__()

    @property
    def end(self) -> int:
        """The file's size in bytes."""
        return self.file.stored.size

    def read_at(self, length: int, offset: int) -> bytes:
        """Read like :data:`.ReadAt`. Raises SourceDamaged, RemoteFailed."""
        length = min(length, self.end - offset)
        if length <= 0:
            return b""
        future = self._take_ahead((length, offset)) or self._loop.begin(self._read_range(length, offset))
        return future.result()  # leaving cancels it; LoopThread.run polls, which takes longer than an answer

    def expect(self, reads: Iterable[tuple[int, int]]) -> None:
        """Read ahead the (length, offset) pairs to be read next, in this order; the reader may skip some."""
        self._expected = deque(read for read in reads if read[0] > 0)
        self._read_ahead()

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole file in pieces."""
        reads = [(min(PIECE_BYTES, self.end - at), at) for at in range(0, self.end, PIECE_BYTES)]
        self.expect(reads)
        for length, offset in reads:
            yield self.read_at(length, offset)

    def map(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results of the calls, in order; they run in threads, since each waits for the network."""
        with ThreadPoolExecutor(HEADERS_AT_ONCE, "shardprep-headers") as pool:
            try:
                yield from pool.map(call, items)
            except BaseException:
                self._is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                self._loop.cancel()
                raise

    def _take_ahead(self, read: tuple[int, int]) -> Future[bytes] | None:
        """Return the future of a range that was read ahead, or None; drop the ranges before it."""
        while self._ahead:
            expected, future = self._ahead.popleft()
            self._read_ahead()
            if expected == read:
                return future
        return None

    def _read_ahead(self) -> None:
        while self._expected and len(self._ahead) < AHEAD_AT_ONCE:
            length, offset = self._expected[0]
            if self._ahead and sum(ahead[0] for ahead, _ in self._ahead) + length > AHEAD_BYTES:
                return
            self._expected.popleft()
            self._ahead.append(((length, offset), self._loop.begin(self._read_range(length, offset))))

    async def _read_range(self, length: int, offset: int) -> bytes:
        if self._is_stopped:
            raise asyncio.CancelledError
        stop, stored = offset + length, self.file.stored
        try:
            return b"".join(
                [part async for part in self._folder.read(self.file.name, offset, stop, only=stored)]
            )
        except (OtherFile, RangeRefused):
            await self._refuse_changed()
            raise

    async def _refuse_changed(self) -> None:
        if await self._folder.metadata(self.file.name) != self.file.stored:
            raise SourceDamaged(
                "changed since it was listed; stop other programs from writing to it, and start again",
                path=self.path,
            )
