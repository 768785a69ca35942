"""``prep --cluster``, with a real cluster of Dask and one of Ray, of processes on loopback."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.clusters import (
    RAY_OPTIONS,
    DaskCluster,
    RayCluster,
    meanwhile,
    needs_dask,
    needs_ray,
    once_begun,
    shards,
    words,
)
from support.datasets import converted, flip, prep, prep_here, tree
from support.ports import free_port

Cluster = DaskCluster | RayCluster
KINDS = [pytest.param(DaskCluster, marks=needs_dask), pytest.param(RayCluster, marks=needs_ray)]


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with closing(request.param()) as cluster:
        yield cluster


def lose(cluster: Cluster, address: str, archives: Path, folder: Path) -> None:
    """Kill the cluster during a conversion, which another one without a cluster finishes."""
    with meanwhile(once_begun(folder / "lost", cluster.close)):
        command = words(archives, "--cluster", address, output="lost", size=1)
        lost = prep(*command, cwd=folder, env=cluster.environment)
    assert lost.returncode == 3, lost.stderr
    gone = ("the executor did not run this shard's job", "no Ray cluster answers")
    assert any(text in lost.stderr for text in gone), lost.stderr
    assert "Run it again: finished shards are kept" in lost.stderr
    assert "Traceback" not in lost.stderr

    assert prep_here(*words(archives, output="lost", size=1), cwd=folder).returncode == 0
    converted(archives, folder / "not-lost", shard_size=1)
    assert tree(folder / "lost") == tree(folder / "not-lost")


def verify_and_repair(archives: Path, folder: Path, cluster: Cluster) -> None:
    """Damage the dataset, verify it on the cluster and here, and repair it there."""
    before = tree(folder / "out")
    first, second = shards(folder / "out")[:2]
    flip(first)
    second.unlink()
    verify = ["verify", "out", "--level", "records", "--json", "--quiet"]
    there = ["--cluster", "auto" if isinstance(cluster, RayCluster) else cluster.address]
    here, found = (prep(*verify, *more, cwd=folder, env=cluster.environment) for more in ([], there))
    assert (here.returncode, found.returncode) == (1, 1), found.stderr
    assert found.stdout == here.stdout
    repair = ["repair", "out", "--source", archives, "--quiet", "--cluster", cluster.address]
    prep(*repair, cwd=folder, env=cluster.environment, check=True)
    assert tree(folder / "out") == before


@pytest.mark.slow
@pytest.mark.parametrize("cluster", KINDS, indirect=True)
def test_a_cluster_converts_to_the_same_bytes_although_workers_are_killed_and_a_lost_one_is_an_error(
    archives: Path, tmp_path: Path, cluster: Cluster
) -> None:
    with meanwhile(once_begun(tmp_path / "out", cluster.kill_workers)):
        command = words(archives, "--cluster", cluster.address)
        prep(*command, cwd=tmp_path, env=cluster.environment, check=True)

    converted(archives, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    verify_and_repair(archives, tmp_path, cluster)
    lose(cluster, cluster.address, archives, tmp_path)


@pytest.mark.torture
@pytest.mark.parametrize("cluster", KINDS[1:], indirect=True)
def test_a_cluster_of_ray_that_was_joined_and_is_gone_is_an_error_and_not_the_end_of_the_process(
    archives: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    lose(cluster, "auto", archives, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        pytest.param("tcp://", "no Dask scheduler answers at", marks=needs_dask),
        pytest.param("", "no Dask scheduler answers at", marks=needs_dask),
        pytest.param("ray://", "no Ray cluster answers at", marks=needs_ray),
        pytest.param("auto", "no Ray cluster answers at", marks=needs_ray),
    ],
)
def test_a_cluster_that_does_not_answer_is_an_error(
    scheme: str, said: str, archives: Path, tmp_path: Path
) -> None:
    address = scheme if scheme == "auto" else f"{scheme}127.0.0.1:{free_port()}"
    alone = os.environ | RAY_OPTIONS | {"RAY_TMPDIR": str(tmp_path)}

    failed = prep(*words(archives, "--cluster", address), cwd=tmp_path, env=alone)

    assert (failed.returncode, failed.stdout) == (3, ""), failed.stderr
    assert failed.stderr.startswith(f"prep: {said} {address}")
    assert failed.stderr.count("\n") == 1


@needs_dask
@pytest.mark.slow
@pytest.mark.parametrize("address", ["head", "dask://head:8786", "tcp://head", ""])
def test_what_is_no_address_of_a_cluster_is_refused_at_once(
    address: str, archives: Path, tmp_path: Path
) -> None:
    failed = prep(*words(archives, "--cluster", address), cwd=tmp_path)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1), failed.stderr
