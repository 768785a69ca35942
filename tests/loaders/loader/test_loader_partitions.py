"""Loaders whose ranks read shards of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardprep.formats import open_dataset
from shardprep.loaders import Flow, LocalShuffle, Receipt
from support.loaded import epoch_of, loader_on, numbers_in

SHUFFLE = LocalShuffle(60, partitions=4)


def shards_of_rank(path: Path, rank: int) -> set[int]:
    """The shards that have the records of this rank of two."""
    with loader_on(path, shuffle=SHUFFLE, rank=rank, world_size=2) as loader:
        numbers = numbers_in(epoch_of(loader))
        return set(loader.dataset.index["shard"][numbers].tolist())


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_a_rank_opens_only_its_shards(lmdb_shards: Path, tmp_path: Path, workers: int) -> None:
    names = [shard.name for shard in open_dataset(lmdb_shards).manifest.shards]
    owned = [shards_of_rank(lmdb_shards, rank) for rank in range(2)]
    receipts = []
    for rank, own in enumerate(owned):
        alone = shutil.copytree(lmdb_shards, tmp_path / str(rank))
        for number in set(range(len(names))) - own:
            (alone / names[number]).unlink()
        with loader_on(
            alone, shuffle=SHUFFLE, rank=rank, world_size=2, seed=rank, workers=workers, read_ahead=0
        ) as loader:
            for _ in range(2):  # another epoch, and another seed than that of above
                assert set(loader.dataset.index["shard"][numbers_in(epoch_of(loader))].tolist()) == own
        with loader_on(alone, shuffle=SHUFFLE, rank=rank, world_size=2, workers=workers) as loader:
            epoch_of(loader)
            receipts.append(loader.receipt())

    Receipt.merge(receipts).check(204)
    assert owned[0] | owned[1] == set(range(len(names)))
    assert len(owned[0] & owned[1]) == 1  # the shard that is cut between partitions 1 and 2


def test_a_flow_has_the_records_of_all_partitions_in_turn(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, shuffle=SHUFFLE, batch_size=204) as loader:
        (numbers,) = [numbers_in([batch]) for batch in loader]
        keys = [loader.key(number) for number in numbers]
    found = [key for key, *_ in Flow.from_dataset(lmdb_shards, shuffle=SHUFFLE, with_keys=True)]

    assert len(keys) == 204
    assert found == [keys[part * 51 + place] for place in range(51) for part in range(4)]
