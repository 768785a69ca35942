"""Reading ahead: the requests to the kernel, their order and amount, and that the thread ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats.shards.in_place import Block
from shardprep.loaders.loader.read_ahead import (
    SHARD_END_BYTES,
    ReadAhead,
    ShardStream,
)
from support.waiting import until

MB = 1 << 20
HERE = Path("shards")


def stream(sizes: Sequence[tuple[int, int]], order: Sequence[int], folder: Path = HERE) -> ShardStream:
    """Shards of so many bytes and records, read in this order."""
    shards = [Block(f"{n}", 0, size, records) for n, (size, records) in enumerate(sizes)]
    return ShardStream(folder, shards, np.array(order))


@pytest.fixture
def files(tmp_path: Path) -> ShardStream:
    """Three sparse shards of 10 MB and 10 records, read in the order 2, 0, 1."""
    for name in "012":
        with (tmp_path / name).open("wb") as file:
            file.truncate(10 * MB)
    return stream([(10 * MB, 10)] * 3, [2, 0, 1], tmp_path)


def test_without_fadvise_the_bytes_are_read(monkeypatch: pytest.MonkeyPatch, files: ShardStream) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    lengths: list[int] = []
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda *what: lengths.append(len(read(*what))))
    ahead = ReadAhead(files, budget=MB)

    ahead.expect(np.array([29]))
    until(lambda: len(lengths) >= 4)
    ahead.close()

    assert lengths == [SHARD_END_BYTES, MB, SHARD_END_BYTES, MB]
