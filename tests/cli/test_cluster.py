"""``prep convert --cluster``, with a real scheduler and real workers of Dask as processes on loopback."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.dask_cluster import DaskCluster, dask_cluster
from support.datasets import converted, flip, prep, prep_here, tree
from support.waiting import until

needs_dask = pytest.mark.skipif(not find_spec("distributed"), reason="Dask is not installed")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaskCluster]:
    with dask_cluster(tmp_path / "cluster") as cluster:
        yield cluster


def words(archives: Path, *more: object, size: int = 60_000) -> list[object]:
    return ["convert", archives, "out", "--split", "train", "--shard-size", size, "--quiet", *more]


@needs_dask
@pytest.mark.slow
def test_a_cluster_converts_to_the_same_bytes_and_a_lost_scheduler_is_an_error(
    archives: Path, tmp_path: Path, cluster: DaskCluster
) -> None:
    command = words(archives, "--cluster", cluster.address)

    def lose() -> None:
        until(lambda: [*(tmp_path / "out").glob("shard-*")])
        os.kill(cluster.scheduler.pid, signal.SIGKILL)

    losing = threading.Thread(target=lose)
    losing.start()
    failed = prep(*command, cwd=tmp_path)
    losing.join()

    assert failed.returncode == 3, failed.stderr
    assert "the executor did not run this shard's job" in failed.stderr
    assert "Traceback" not in failed.stderr
    converted(archives, tmp_path / "whole")
    with dask_cluster(tmp_path / "cluster") as again:
        prep(*words(archives, "--cluster", again.address), cwd=tmp_path, check=True)
        assert tree(tmp_path / "out") == tree(tmp_path / "whole")
        verify_and_repair(archives, tmp_path, again.address)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def verify_and_repair(archives: Path, folder: Path, address: str) -> None:
    """Damage the dataset, verify it on the cluster and here, and repair it there."""
    first, second = sorted((folder / "out").glob("shard-*"))[:2]
    flip(first, first.stat().st_size // 2)
    second.unlink()
    verify = ["verify", "out", "--json", "--quiet"]
    here, there = (prep(*verify, *more, cwd=folder) for more in ([], ["--cluster", address]))
    assert (here.returncode, there.returncode) == (1, 1), there.stderr
    assert there.stdout == here.stdout
    prep("repair", "out", "--source", archives, "--quiet", "--cluster", address, cwd=folder, check=True)


@needs_dask
@pytest.mark.torture
def test_workers_that_are_killed_again_and_again_change_nothing(
    archives: Path, tmp_path: Path, cluster: DaskCluster
) -> None:
    ended = threading.Event()

    def kill() -> None:
        number, seen = 0, 0
        while not ended.wait(0.02):
            if len([*(tmp_path / "out").glob("shard-*")]) < seen + 3:
                continue
            seen += 3
            cluster.workers[number].kill()
            cluster.workers[number].wait()
            cluster.workers[number] = cluster.worker()
            number = 1 - number

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        for _ in range(20):  # Dask gives up on a job that was at four dead workers
            done = prep(*words(archives, "--cluster", cluster.address, size=1), cwd=tmp_path)
            if not done.returncode:
                break
            assert done.returncode == 3, done.stderr
            assert "the executor did not run this shard's job" in done.stderr
    finally:
        ended.set()
        killing.join()

    converted(archives, tmp_path / "whole", shard_size=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@needs_dask
@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_an_error(archives: Path, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        failed = prep(*words(archives, "--cluster", address), cwd=tmp_path)

    assert (failed.returncode, failed.stdout) == (3, "")
    assert failed.stderr.startswith(f"prep: no Dask scheduler answers at {address}")
    assert failed.stderr.count("\n") == 1


def test_a_part_has_no_cluster(archives: Path, tmp_path: Path) -> None:
    done = prep_here(*words(archives, "--part", "1/2", "--cluster", "tcp://127.0.0.1:1"), cwd=tmp_path)

    assert done.returncode == 2
