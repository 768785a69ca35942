"""Jobs and their counters, which workers of any host write, and the one that shows the bar reads."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from shardprep.formats.conversion.plan import PlannedShard
from shardprep.formats.runtime import jobs
from shardprep.formats.runtime.jobs import ProgressCounters, ShardCounter
from shardprep.formats.runtime.work_folder import make_run_folder
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
