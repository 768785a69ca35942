"""What happens to a cluster of Dask during a conversion changes nothing, and leaves nothing in the output."""

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from shardprep.formats import make_sample
from shardprep.formats.runtime.jobs import COUNTERS_NAME
from support.clusters import DaskCluster, meanwhile, needs_dask, once_begun, shards, words
from support.datasets import converted, prep, tree
from support.waiting import until

pytestmark = [pytest.mark.torture, needs_dask]


def command(archives: Path, *more: object) -> list[str]:
    return [str(word) for word in words(archives, *more, size=1)]


def start(archives: Path, folder: Path, cluster: DaskCluster) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "shardprep", *command(archives, "--cluster", cluster.address)]
    return subprocess.Popen(program, cwd=folder, stderr=subprocess.PIPE, text=True)


def whole(archives: Path, folder: Path) -> None:
    """Check that the output is that of a conversion here, without any other file."""
    if not (folder / "whole").exists():
        converted(archives, folder / "whole", shard_size=1)
    assert tree(folder / "out") == tree(folder / "whole")
    assert not (folder / "out" / ".prep").exists()


def test_a_nanny_that_is_killed(archives: Path, tmp_path: Path) -> None:
    with closing(DaskCluster(nannies=True)) as cluster:
        with meanwhile(once_begun(tmp_path / "out", cluster.workers[0].kill)):
            prep(*command(archives, "--cluster", cluster.address), cwd=tmp_path, check=True)
        whole(archives, tmp_path)
        converted(archives, tmp_path / "large", shard_size=1_000_000)  # read in a child of a daemonic worker
        verify = ["verify", "large", "--level", "decode", "--quiet", "--cluster", cluster.address]
        prep(*verify, cwd=tmp_path, check=True)


def test_a_worker_that_is_stopped_past_its_time_to_live_and_goes_on_writing_later(
    archives: Path, tmp_path: Path
) -> None:
    with closing(DaskCluster()) as cluster:
        stopped = cluster.workers[0]
        with meanwhile(once_begun(tmp_path / "out", lambda: stopped.send_signal(signal.SIGSTOP))):
            prep(*command(archives, "--cluster", cluster.address), cwd=tmp_path, check=True)
        whole(archives, tmp_path)
        again = start(archives, tmp_path, cluster)
        stopped.send_signal(signal.SIGCONT)
        said = again.communicate()[1]
        assert again.returncode == 0, said
        until(lambda: stopped.poll() is not None)  # it ends where the scheduler has given it up

    whole(archives, tmp_path)


def test_two_interruptions_each_with_an_immediate_rerun(tmp_path: Path) -> None:
    archives, output = tmp_path / "archives", tmp_path / "out"
    make_sample(archives, classes=4, train_per_class=30, val=10, test=3)  # so many that no run ends before
    with closing(DaskCluster()) as cluster:
        for count in (2, 8):
            running = start(archives, tmp_path, cluster)
            # workers of the run before it may publish shards until this one has claimed the output
            until(lambda pid=running.pid: [*output.glob(f".prep/run-*-{pid}-*/{COUNTERS_NAME}")])
            until(lambda count=count: len(shards(output)) >= count)
            running.send_signal(signal.SIGINT)
            said = running.communicate()[1]
            assert running.returncode == 130, said
            assert said.startswith("prep: interrupted; "), said
        prep(*command(archives), cwd=tmp_path, check=True)  # here, while workers may still write
        whole(archives, tmp_path)
