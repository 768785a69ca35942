"""The rank of a loader where torch.distributed is initialised, without environment variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardprep.formats.errors import UsageError
from support.loaded import epoch_of, loader_on
from support.rank_programs import assert_shared, told_by

torch = pytest.importorskip("torch")

SPAWNED = """
import sys
import torch.distributed
import torch.multiprocessing
from support.rank_programs import tell_epoch

def train(rank, path, meeting):
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    tell_epoch(path)
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, sys.argv[1:], nprocs=2)
"""


@pytest.mark.slow
def test_ranks_that_torch_spawns_share_the_epoch(lmdb_shards: Path, tmp_path: Path) -> None:
    told = told_by(tmp_path, SPAWNED, (lmdb_shards, tmp_path / "meeting"))

    assert_shared(told, ranks=2)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only one of a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def in_environment(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


@pytest.mark.usefixtures("alone")
def test_a_group_that_contradicts_the_environment_is_an_error(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_environment(monkeypatch, 1, 2)

    with pytest.raises(
        UsageError, match=r"torch\.distributed says rank 0 of 1, but RANK and WORLD_SIZE says"
    ):
        loader_on(lmdb_shards)
    with loader_on(lmdb_shards, rank=1, world_size=2) as loader:
        assert len(epoch_of(loader)) == 11


def test_a_group_that_is_initialised_after_the_loader_is_an_error_where_it_has_another_rank(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with loader_on(lmdb_shards) as good, loader_on(lmdb_shards, rank=1, world_size=2) as given:
        in_environment(monkeypatch, 1, 2)
        with loader_on(lmdb_shards) as other:
            request.getfixturevalue("alone")
            assert len(epoch_of(good)) == 21
            assert len(epoch_of(given)) == 11
            with pytest.raises(
                UsageError, match=r"rank 0 of 1, but the Loader.*rank 1 of 2.*train_dataloader"
            ):
                iter(other)
