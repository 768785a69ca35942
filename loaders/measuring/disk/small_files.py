"""Comparing many small files with one shard of the same bytes, in a temporary folder."""

from __future__ import annotations

import os
import random
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from shardprep.formats.system.owned import Owned

from .cold_and_warm import ColdAndWarm, cold_method
from .page_cache import COLD, DIRECT, ColdWay, evict, resident_share
from .profile import Measurement, Reads, SmallFileReads
from .read_plans import PAGE, Cursor, Forward
from .reading import buffer
from .scratch import noise, room, temporary_folder, write_all
from .target import OpenFiles

MAX_COUNT = 500
MIN_COUNT = 16
MAX_BYTES = 64 << 20
SHARD_BLOCK = 1 << 20
HOW = "open, preadv and close of each in random order"


class SmallFiles(Owned, AbstractContextManager["SmallFiles"]):
    """The step that measures small files; the first round makes them, leaving the context removes them.

    ``missing`` is why there are no rates; None while there may be some. Not thread-safe.
    """

    title = "small files"
    weight = 4

    def __init__(self, place: Path | None, record_bytes: int, way: ColdWay) -> None:
        self.missing = None if place else "no folder beside it is writable"
        self._place = place
        self._size = record_bytes
        self._way = way
        self._stack = ExitStack()
        self._paths: list[Path] = []
        self._shard: ColdAndWarm | None = None
        self._cold: list[float] = []
        self._warm: list[float] = []
        self._buffer = buffer(-(-record_bytes // PAGE) * PAGE, direct=way.method == DIRECT)

    def round(self, seconds: float) -> None:
        """Read files and shard, each cold and warm, for at most ``seconds`` each."""
        if self._place is None or self.missing:
            return
        try:
            if self._shard is None:
                self._shard = self._made(self._place, seconds)
            self._read_files(seconds)
            self._shard.round(seconds)
        except OSError as error:
            self.missing = f"could not be measured: {error.strerror or error}"
            self._stack.close()

    def _made(self, place: Path, seconds: float) -> ColdAndWarm:
        """Make the files, flushed one by one, so that their pages can be dropped and the deadline is kept."""
        folder = self._stack.enter_context(temporary_folder(place))
        data, deadline = memoryview(noise(self._size)), time.monotonic() + seconds
        count = max(1, min(MAX_COUNT, room(place, MAX_BYTES) // self._size // 2))
        for number in range(count):
            if number >= MIN_COUNT and time.monotonic() > deadline:
                break
            self._paths.append(folder / f"{number:03d}.jpg")
            _write(self._paths[-1], data, 1)
        _write(folder / "shard", data, len(self._paths))
        files = OpenFiles.of([folder / "shard"], self._stack)
        if self._way.method == DIRECT:
            files.open_direct()
        return ColdAndWarm(files, self._way, Forward(files.sizes, SHARD_BLOCK, Cursor()))

    def _read_files(self, seconds: float) -> None:
        if self._way.method == DIRECT or (self._way.method and self._forgotten()):
            self._cold.append(self._read_all(seconds, direct=self._way.method == DIRECT))
        self._read_all(seconds, direct=False)
        self._warm.append(self._read_all(seconds, direct=False))

    def _forgotten(self) -> bool:
        for path in self._paths:
            evict(path)
        return max(map(resident_share, self._paths)) <= COLD

    def _read_all(self, seconds: float, *, direct: bool) -> float:
        """Bytes per second of all files, or of those for which there was time."""
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        order = random.sample(self._paths, len(self._paths))
        size, began = 0, time.perf_counter()
        for path in order:
            size += _read_whole(path, flags, self._buffer)
            if (taken := time.perf_counter() - began) >= seconds:
                break
        return size / taken

    @property
    def reads(self) -> SmallFileReads | None:
        """Medians over the rounds; None where there are none."""
        if self.missing or self._shard is None:
            return None
        cold = Measurement.of(self._cold, HOW + cold_method(self._way.method))
        files = Reads(cold, Measurement.of(self._warm, f"{HOW}, from memory"))
        return SmallFileReads(len(self._paths), self._size, files, self._shard.reads)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _write(path: Path, data: memoryview, times: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(times):
            write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_whole(path: Path, flags: int, into: memoryview) -> int:
    descriptor = os.open(path, flags)
    try:
        return os.preadv(descriptor, [into], 0)
    finally:
        os.close(descriptor)
