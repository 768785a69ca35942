"""``prep --cluster`` with a real cluster of Ray, of processes on loopback."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.datasets import converted, flip, prep, tree
from support.ray_cluster import OPTIONS, RayCluster, ray_cluster
from support.waiting import until

has_ray = find_spec("ray") is not None and find_spec("grpc") is not None
needs_ray = pytest.mark.skipif(not has_ray, reason="Ray is not installed")


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


def words(archives: Path, *more: object, output: str = "out", size: int = 60_000) -> list[object]:
    return ["convert", archives, output, "--split", "train", "--shard-size", size, "--quiet", *more]


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do that in another thread; the event is set at the end of the context."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def shards(output: Path) -> list[Path]:
    return [*output.glob("shard-*")]


def kill_workers(cluster: RayCluster) -> None:
    for worker in cluster.workers():
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(worker, signal.SIGKILL)


def once_begun(output: Path, act: Callable[[], None]) -> Callable[[threading.Event], None]:
    """Return what does that as soon as there is a shard."""

    def work(ended: threading.Event) -> None:
        until(lambda: ended.is_set() or shards(output))
        act()

    return work


def lose(cluster: RayCluster, address: str, archives: Path, folder: Path) -> None:
    """Kill the cluster during a conversion, which another one without a cluster finishes."""
    with meanwhile(once_begun(folder / "lost", cluster.end)):
        command = words(archives, "--cluster", address, output="lost", size=1)
        lost = prep(*command, cwd=folder, env=cluster.environment)
    assert lost.returncode == 3, lost.stderr
    gone = ("the executor did not run this shard's job", "no Ray cluster answers")
    assert any(text in lost.stderr for text in gone), lost.stderr
    assert "Run it again: finished shards are kept" in lost.stderr
    assert "Traceback" not in lost.stderr

    prep(*words(archives, output="lost", size=1), cwd=folder, check=True)
    converted(archives, folder / "not-lost", shard_size=1)
    assert tree(folder / "lost") == tree(folder / "not-lost")


def verify_and_repair(archives: Path, folder: Path, cluster: RayCluster) -> None:
    """Damage the dataset, verify it on the cluster and here, and repair it there."""
    before = tree(folder / "out")
    first, second = sorted(shards(folder / "out"))[:2]
    flip(first, first.stat().st_size // 2)
    second.unlink()
    verify = ["verify", "out", "--level", "records", "--json", "--quiet"]
    there = ["--cluster", "auto"]
    here, found = (prep(*verify, *more, cwd=folder, env=cluster.environment) for more in ([], there))
    assert (here.returncode, found.returncode) == (1, 1), found.stderr
    assert found.stdout == here.stdout
    repair = ["repair", "out", "--source", archives, "--quiet", "--cluster", cluster.address]
    prep(*repair, cwd=folder, env=cluster.environment, check=True)
    assert tree(folder / "out") == before


@needs_ray
@pytest.mark.slow
def test_a_cluster_of_ray_converts_to_the_same_bytes_although_workers_are_killed_and_a_lost_one_is_an_error(
    archives: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    with meanwhile(once_begun(tmp_path / "out", lambda: kill_workers(cluster))):
        prep(*words(archives, "--cluster", "auto"), cwd=tmp_path, env=cluster.environment, check=True)

    converted(archives, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    verify_and_repair(archives, tmp_path, cluster)
    lose(cluster, cluster.address, archives, tmp_path)


@needs_ray
@pytest.mark.torture
def test_a_cluster_of_ray_that_was_joined_and_is_gone_is_an_error_and_not_the_end_of_the_process(
    archives: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    lose(cluster, "auto", archives, tmp_path)


@needs_ray
@pytest.mark.torture
def test_workers_of_ray_that_are_killed_again_and_again_change_nothing(
    archives: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    def kill(ended: threading.Event) -> None:
        seen = 0
        while not ended.wait(0.02):
            if len(shards(tmp_path / "out")) >= seen + 6:
                seen += 6
                kill_workers(cluster)

    with meanwhile(kill):
        for _ in range(20):  # Ray gives up on a task that was at four dead workers
            done = prep(
                *words(archives, "--cluster", cluster.address, size=1), cwd=tmp_path, env=cluster.environment
            )
            if not done.returncode:
                break
            assert done.returncode == 3, done.stderr
            assert "WorkerCrashedError" in done.stderr

    converted(archives, tmp_path / "whole", shard_size=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@needs_ray
@pytest.mark.slow
def test_a_cluster_of_ray_that_does_not_answer_is_an_error(archives: Path, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nothing = f"ray://127.0.0.1:{closed.getsockname()[1]}"
        alone = os.environ | OPTIONS | {"RAY_TMPDIR": str(tmp_path)}
        for address in (nothing, "auto"):
            failed = prep(*words(archives, "--cluster", address), cwd=tmp_path, env=alone)

            assert (failed.returncode, failed.stdout) == (3, ""), failed.stderr
            assert failed.stderr.startswith(f"prep: no Ray cluster answers at {address}")
            assert failed.stderr.count("\n") == 1
