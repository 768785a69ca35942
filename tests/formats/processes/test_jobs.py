"""Jobs and their counters, which workers of any host write, and the one that shows the bar reads."""

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardprep.formats.conversion.plan import PlannedShard
from shardprep.formats.runtime import jobs
from shardprep.formats.runtime.jobs import DecodesNothing, JobRunner, ProgressCounters, ShardCounter
from shardprep.formats.runtime.work_folder import is_of_this_host, make_run_folder
from shardprep.formats.shards.container import Extent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_run_folder(tmp_path)


def counters(path: Path, shards: int = 3) -> ProgressCounters:
    """Counters of shards of ten images with 70 bytes together."""
    extent = Extent(records=10, payload_bytes=70, key_bytes=1)
    planned = [PlannedShard(f"shard-{n}", n, 10 * n, 10 * n + 10, extent) for n in range(shards)]
    return ProgressCounters(path, planned)


def flags(counter: ShardCounter) -> int:
    found: int = fcntl.fcntl(counter._file.fileno(), fcntl.F_GETFL)
    return found


def test_each_worker_writes_its_own_counter_which_is_seen_at_once(path: Path) -> None:
    seen = counters(path)
    first, last = ShardCounter(path, 0), ShardCounter(path, 2)
    for count in range(1, 8):
        first.set(count)
        last.set(3)
        assert (seen.done(0), seen.done(1), seen.done(2)) == (count, 0, 3)
        assert seen.total() == (count + 3, 7 * (count + 3))


def test_a_worker_of_another_host_writes_synchronously_and_now_and_then_and_at_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counters(path)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    clock = [0.0]
    monkeypatch.setattr(jobs, "monotonic", lambda: clock[-1])
    counter = ShardCounter(path, 1)
    assert flags(counter) & os.O_DSYNC
    assert flags(counter) & os.O_ACCMODE == os.O_WRONLY

    shown = []
    for count, now in enumerate((0.2, 0.9, 1.1, 1.5, 2.2, 2.3), 1):
        clock.append(now)
        counter.set(count)
        shown.append(seen.done(1))
    assert shown == [0, 0, 3, 3, 5, 5]
    counter.close()
    assert seen.done(1) == 6


@dataclass(frozen=True)
class Named(DecodesNothing):
    """A job that returns its shard's name."""

    output: Path
    shard: PlannedShard

    def build(self) -> str:
        return self.shard.name

    def key_at(self, place: int) -> str:
        return str(place)


def test_results_are_in_the_order_of_numbers_and_not_of_names(path: Path) -> None:
    shards = [PlannedShard(f"shard-{n:05d}", n, 0, 1, Extent(1, 1, 1)) for n in (100_000, 99_999, 3)]
    jobs = (Named(path, shard) for shard in shards)

    built = JobRunner(workers=0).run(jobs, ProgressCounters(path, shards))

    assert built == ["shard-00003", "shard-99999", "shard-100000"]


@pytest.mark.parametrize(
    ("made", "asking", "same"), [("n-1", "n-1", True), ("n-1", "n", False), ("n", "n-1", False)]
)
def test_a_run_is_of_the_host_that_made_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, asking: str, same: bool
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: made)
    folder = make_run_folder(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: asking)

    assert is_of_this_host(folder) is same
