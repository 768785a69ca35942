"""What happens to a cluster of Dask during a conversion changes nothing, and leaves nothing in the output."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardprep.formats import make_sample
from shardprep.formats.runtime.jobs import COUNTERS_NAME
from support.dask_cluster import dask_cluster
from support.datasets import converted, prep, tree
from support.waiting import until

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(not find_spec("distributed"), reason="Dask is not installed"),
]


def words(archives: Path, *more: object) -> list[str]:
    options = ["--split", "train", "--shard-size", 1, "--quiet", *more]
    return [str(word) for word in ("convert", archives, "out", *options)]


def begun(folder: Path, shards: int = 1) -> None:
    """Wait for so many shards."""
    until(lambda: len([*(folder / "out").glob("shard-*")]) >= shards)


def at_work(folder: Path, pid: int) -> None:
    """Wait until a process has claimed the output, and begins to build."""
    until(lambda: [*(folder / "out" / ".prep").glob(f"run-*-{pid}-*/{COUNTERS_NAME}")])


def whole(archives: Path, folder: Path) -> None:
    """Check that the output is that of a conversion here, without any other file."""
    converted(archives, folder / "whole", shard_size=1)
    assert tree(folder / "out") == tree(folder / "whole")
    assert not (folder / "out" / ".prep").exists()


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_nanny_that_is_killed(archives: Path, tmp_path: Path) -> None:
    with dask_cluster(tmp_path / "cluster", nannies=True) as cluster:

        def kill() -> None:
            begun(tmp_path)
            cluster.workers[0].kill()

        killing = meanwhile(kill)
        prep(*words(archives, "--cluster", cluster.address), cwd=tmp_path, check=True)
        killing.join()
        whole(archives, tmp_path)
        converted(
            archives, tmp_path / "large", shard_size=1_000_000
        )  # read in a process that a daemonic worker starts
        verify = ["verify", "large", "--level", "decode", "--quiet", "--cluster", cluster.address]
        prep(*verify, cwd=tmp_path, check=True)


def test_a_worker_that_is_stopped_past_its_time_to_live_and_goes_on_writing_later(
    archives: Path, tmp_path: Path
) -> None:
    with dask_cluster(tmp_path / "cluster") as cluster:
        stopped = cluster.workers[0]

        def stop() -> None:
            begun(tmp_path)
            stopped.send_signal(signal.SIGSTOP)

        stopping = meanwhile(stop)
        prep(*words(archives, "--cluster", cluster.address), cwd=tmp_path, check=True)
        stopping.join()
        whole(archives, tmp_path)
        again = subprocess.Popen(
            [sys.executable, "-m", "shardprep.cli", *words(archives, "--cluster", cluster.address)],
            cwd=tmp_path,
        )
        stopped.send_signal(signal.SIGCONT)
        assert again.wait() == 0
        until(lambda: stopped.poll() is not None)  # it ends where the scheduler has given it up

    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert not (tmp_path / "out" / ".prep").exists()


def test_two_interruptions_each_with_an_immediate_rerun(tmp_path: Path) -> None:
    archives = tmp_path / "archives"
    make_sample(archives, classes=4, train_per_class=30, val=10, test=3)  # so many that no run ends before
    with dask_cluster(tmp_path / "cluster") as cluster:
        for shards in (2, 8):
            command = [sys.executable, "-m", "shardprep.cli", *words(archives, "--cluster", cluster.address)]
            running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
            at_work(tmp_path, running.pid)  # workers of the run before it may publish shards until then
            begun(tmp_path, shards)
            running.send_signal(signal.SIGINT)
            said = running.communicate()[1]
            assert running.returncode == 130, said
            assert said.startswith("prep: interrupted; "), said
        prep(*words(archives), cwd=tmp_path, check=True)  # here, while workers may still write
        whole(archives, tmp_path)
