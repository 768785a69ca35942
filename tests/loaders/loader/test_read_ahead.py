"""Reading ahead: the requests to the kernel, their order and amount, and that the thread ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.shards.in_place import Block
from shardprep.loaders.loader.read_ahead import (
    CHUNK_BYTES,
    MAX_PENDING_CHUNKS,
    SHARD_END_BYTES,
    ReadAhead,
    ShardStream,
)
from shardprep.loaders.measuring.disk_files import forget, resident
from support.waiting import until

MB = 1 << 20
HERE = Path("shards")


def stream(sizes: Sequence[tuple[int, int]], order: Sequence[int], folder: Path = HERE) -> ShardStream:
    """Shards of so many bytes and records, read in this order."""
    shards = [Block(f"{n}", 0, size, records) for n, (size, records) in enumerate(sizes)]
    return ShardStream.of(folder, shards, np.array(order))


sizes = st.lists(st.integers(1, 20 * MB), min_size=1, max_size=6)


@given(sizes=sizes, data=st.data())
def test_pieces_are_the_bytes_of_the_stream_in_order_each_once(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes) + MB))

    pieces = list(stream([(size, 1) for size in sizes], order).pieces(start, stop))

    position = start
    for path, offset, length in pieces:
        begin = sum(sizes[n] for n in order[: order.index(int(path.name))])
        assert begin + offset == position
        assert 0 < length <= min(CHUNK_BYTES, sizes[int(path.name)] - offset)
        position += length
    assert position == min(stop, sum(sizes))


def test_records_lie_evenly_in_their_shards_wherever_these_come_in_the_stream() -> None:
    two = stream([(100, 10), (60, 3), (0, 0), (40, 4)], [3, 1, 2, 0])

    assert two.span(np.array([0])) == (100, 110)
    assert two.span(np.array([9])) == (190, 200)
    assert two.span(np.array([10])) == (40, 60)
    assert two.span(np.array([13])) == (0, 10)
    assert two.span(np.array([16, 10, 5])) == (30, 160)


@given(data=st.data(), records=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_every_record_lies_within_its_own_shard(data: st.DataObject, records: list[int]) -> None:
    sizes = [data.draw(st.integers(count * 10, count * 1000)) for count in records]
    order = data.draw(st.permutations(range(len(records))))
    number = data.draw(st.integers(0, sum(records) - 1))
    shard = int(np.searchsorted(np.cumsum(records), number, side="right"))

    begin, end = stream(list(zip(sizes, records, strict=True)), order).span(np.array([number]))

    first = sum(sizes[n] for n in order[: order.index(shard)])
    assert first <= begin < end <= first + sizes[shard] + 1


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The requests to the kernel, (file, offset, length), as they happen."""
    said: list[tuple[str, int, int]] = []
    advise = os.posix_fadvise

    def listen(descriptor: int, offset: int, length: int, advice: int) -> None:
        advise(descriptor, offset, length, advice)
        said.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, length))

    monkeypatch.setattr(os, "posix_fadvise", listen)
    return said


@pytest.fixture
def files(tmp_path: Path) -> ShardStream:
    """Three sparse shards of 10 MB and 10 records, read in the order 2, 0, 1."""
    for name in "012":
        with (tmp_path / name).open("wb") as file:
            file.truncate(10 * MB)
    return stream([(10 * MB, 10)] * 3, [2, 0, 1], tmp_path)


def test_the_budget_bounds_what_is_asked_for_and_nothing_is_asked_for_twice(
    asked: list[Any], files: ShardStream
) -> None:
    ahead = ReadAhead(files, budget=3 * MB)

    ahead.expect(np.array([20]))
    until(lambda: len(asked) > 1)
    assert asked[1:] == [("2", 0, 4 * MB)]
    ahead.expect(np.array([21, 22]))
    until(lambda: len(asked) > 2)
    assert asked[2:] == [("2", 4 * MB, 2 * MB)]
    ahead.expect(np.array([20]))
    ahead.expect(np.array([29, 0]))
    until(lambda: len(asked) > 5)
    ahead.close()

    assert asked[3:] == [("2", 6 * MB, 4 * MB), ("0", 9 * MB, SHARD_END_BYTES), ("0", 0, 4 * MB)]


def test_the_end_of_a_shard_is_asked_for_before_the_rest_of_it(asked: list[Any], files: ShardStream) -> None:
    ahead = ReadAhead(files, budget=11 * MB)

    ahead.expect(np.array([20]))
    until(lambda: len(asked) >= 6)
    ahead.close()

    assert [(name, offset) for name, offset, _ in asked if offset in (0, 10 * MB - SHARD_END_BYTES)] == [
        ("2", 10 * MB - SHARD_END_BYTES),
        ("2", 0),
        ("0", 10 * MB - SHARD_END_BYTES),
        ("0", 0),
    ]


def test_of_a_subset_only_pieces_that_are_mostly_chosen_are_asked_for(
    asked: list[Any], tmp_path: Path
) -> None:
    for name in "012":
        with (tmp_path / name).open("wb") as file:
            file.truncate(40 * MB)
    shards = [Block(name, 0, 40 * MB, 40) for name in "012"]
    chosen = np.r_[4:8, 20:22, 26, 30, 80, 90, 116:120]  # all of a piece, half of it, and few
    stream_of_subset = ShardStream.of(tmp_path, shards, np.array([0, 1, 2]), chosen)
    ahead = ReadAhead(stream_of_subset, budget=1 << 40)

    ahead.expect(np.array([0]))
    until(lambda: len(asked) >= 5)
    ahead.close()

    assert asked == [
        ("0", 39 * MB, SHARD_END_BYTES), ("0", 4 * MB, 4 * MB), ("0", 20 * MB, 4 * MB),
        ("2", 39 * MB, SHARD_END_BYTES), ("2", 36 * MB, 4 * MB),
    ]  # fmt: skip


def test_few_chunks_are_on_their_way_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chunks = 3 * MAX_PENDING_CHUNKS
    with (tmp_path / "0").open("wb") as file:
        file.truncate(chunks * CHUNK_BYTES)
    here, most, read = [0], [0], os.pread

    def ask(descriptor: int, offset: int, length: int, advice: int) -> None:
        here[0] += length == CHUNK_BYTES
        most[0] = max(most[0], here[0])

    def wait(descriptor: int, length: int, offset: int) -> bytes:
        assert (offset + 1) % CHUNK_BYTES == 0
        here[0] -= 1
        return read(descriptor, length, offset)

    monkeypatch.setattr(os, "posix_fadvise", ask)
    monkeypatch.setattr(os, "pread", wait)
    ahead = ReadAhead(stream([(chunks * CHUNK_BYTES, 1)], [0], tmp_path), budget=0)
    ahead.expect(np.array([0]))
    until(lambda: here[0] == MAX_PENDING_CHUNKS and most[0] == MAX_PENDING_CHUNKS)
    ahead.close()


def test_reading_ahead_begins_where_a_resumed_epoch_does(asked: list[Any], files: ShardStream) -> None:
    ahead = ReadAhead(files, budget=2 * MB)

    ahead.expect(np.array([5, 4]))
    until(lambda: len(asked) >= 2)
    ahead.close()

    assert asked == [("0", 9 * MB, SHARD_END_BYTES), ("0", 4 * MB, 4 * MB)]


def test_the_end_of_the_stream_ends_the_asking(asked: list[Any], files: ShardStream) -> None:
    ahead = ReadAhead(files, budget=1 << 40)

    ahead.expect(np.array([9]))
    ahead.expect(np.array([19]))
    until(lambda: len(asked) >= 6)
    ahead.close()

    assert asked[:3] == [("0", 9 * MB, SHARD_END_BYTES), ("0", 9 * MB, MB), ("1", 9 * MB, SHARD_END_BYTES)]
    assert asked[3:] == [("1", 0, 4 * MB), ("1", 4 * MB, 4 * MB), ("1", 8 * MB, 2 * MB)]


def test_missing_files_are_left_to_the_readers_of_records(
    asked: list[Any], files: ShardStream, tmp_path: Path
) -> None:
    (tmp_path / "2").unlink()
    ahead = ReadAhead(files, budget=MB)

    ahead.expect(np.array([20]))
    ahead.expect(np.array([0]))
    until(lambda: len(asked) >= 2)
    ahead.close()

    assert asked == [("0", 9 * MB, SHARD_END_BYTES), ("0", 0, 2 * MB)]


def test_closing_ends_the_thread_gives_back_the_file_and_may_be_repeated(files: ShardStream) -> None:
    before = descriptors()

    for _ in range(20):
        ahead = ReadAhead(files, budget=MB)
        ahead.expect(np.array([20]))
        ahead.close()
        ahead.close()

    assert not [t for t in threading.enumerate() if t.name == "shardprep-read-ahead"]
    assert descriptors() == before


def test_closing_does_not_wait_for_what_has_not_been_asked_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "0").touch()
    slow, calls = threading.Event(), []
    monkeypatch.setattr(os, "posix_fadvise", lambda *what: (calls.append(what), slow.wait(60)))
    ahead = ReadAhead(stream([(1000 * CHUNK_BYTES, 10)], [0], tmp_path), budget=1 << 40)
    ahead.expect(np.array([0]))
    until(lambda: bool(calls))

    threading.Timer(0.1, slow.set).start()
    ahead.close()

    assert len(calls) <= 2  # the pending request, and at most the next one in the file


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


def test_what_was_read_ahead_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "0"
    path.write_bytes(os.urandom(8 * MB))
    with path.open("rb") as file:
        forget(file.fileno())
        last, beyond = 4 * MB - 1, 4 * MB + MB // 4  # of the same chunk, up to the budget and after it
        if is_cached(file.fileno(), last) or is_cached(file.fileno(), beyond):
            pytest.skip("this file system does not let go of its pages, or does not say")
        ahead = ReadAhead(stream([(8 * MB, 8)], [0], tmp_path), budget=2 * MB)
        ahead.expect(np.array([1]))
        until(lambda: is_cached(file.fileno(), last))
        time.sleep(0.1)  # in which more would arrive
        ahead.close()
        assert not is_cached(file.fileno(), beyond)


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether this byte is in memory; a read would say so, too, but itself read ahead. True where unknown."""
    try:
        return resident(descriptor, [(offset, offset + 1)]) == (1, 1)
    except OSError:
        return True


def test_a_fifo_in_the_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").write_bytes(bytes(MB))
    ahead = ReadAhead(stream([(MB, 1), (MB, 1)], [0, 1], tmp_path), budget=4 * MB)
    ahead.expect(np.array([0]))
    until(ahead._spans.empty)
    time.sleep(0.2)  # in which it opens the first

    began = time.monotonic()
    ahead.close()

    assert time.monotonic() - began < 4
