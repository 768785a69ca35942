"""Loaders whose ranks read shards of their own."""

from __future__ import annotations

import shutil
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import pytest
from loaded import epoch_of, loader_on, numbers_in

from shardprep.formats import open_dataset
from shardprep.loaders import Flow, LocalShuffle, Receipt

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


def test_training_goes_on_with_more_ranks_in_the_same_global_steps(lmdb_shards: Path) -> None:
    def loader(rank: int, world_size: int):  # type: ignore[no-untyped-def]
        batch_size = 24 // world_size
        return loader_on(
            lmdb_shards, shuffle=SHUFFLE, rank=rank, world_size=world_size, batch_size=batch_size
        )

    with loader(0, 1) as one:
        expected = [numbers_in([batch]) for batch in one]
    with loader(0, 2) as stopped:
        batches = iter(stopped)
        for _ in range(3):
            next(batches)
        state = stopped.state_dict()
    rest = []
    for rank in range(4):
        with loader(rank, 4) as resumed:
            resumed.load_state_dict(state)
            rest.append([numbers_in([batch]) for batch in resumed])

    steps = [list(chain.from_iterable(ranks)) for ranks in zip_longest(*rest, fillvalue=[])]
    assert steps == expected[3:]


def test_a_part_of_a_dataset_has_partitions_of_its_own_records(lmdb_shards: Path) -> None:
    chosen = np.arange(20, 150, 2)
    receipts, numbers = [], []
    for rank in range(4):
        with loader_on(
            lmdb_shards, shuffle=SHUFFLE, records=chosen, batch_size=5, rank=rank, world_size=4
        ) as loader:
            numbers += numbers_in(epoch_of(loader))
            receipts.append(loader.receipt())
            assert "partitions" in loader.identity["shuffle"]

    Receipt.merge(receipts).check(len(chosen))
    assert sorted(numbers) == chosen.tolist()


def test_a_flow_has_the_records_of_all_partitions_in_turn(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, shuffle=SHUFFLE, batch_size=204) as loader:
        (numbers,) = [numbers_in([batch]) for batch in loader]
        keys = [loader.key(number) for number in numbers]
    found = [key for key, *_ in Flow.from_dataset(lmdb_shards, shuffle=SHUFFLE, with_keys=True)]

    assert len(keys) == 204
    assert found == [keys[part * 51 + place] for place in range(51) for part in range(4)]
