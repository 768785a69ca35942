"""What a loader reads: parts of a dataset, shards of its own, classes in turn, and ahead of time."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import open_dataset, write_dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.shards.in_place import Block
from shardprep.loaders import Flow, Loader, LocalShuffle, Receipt, SortedByClass
from shardprep.loaders.loader.read_ahead import SHARD_END_BYTES, ReadAhead, ShardStream
from support.loaded import epoch_of, loader_on, numbers_in
from support.sampling import torture_except
from support.waiting import until

RECORDS = 204


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": [3, 5, 3]}, "has 3 more than once"),
        ({"records": [0, RECORDS]}, f"has {RECORDS}; record numbers of this dataset are 0 to {RECORDS - 1}"),
        ({"records": [-1]}, "has -1; record numbers"),
        ({"records": [], "without": []}, "select no record"),
        ({"records": [False] * RECORDS}, "select no record"),
        ({"records": [True] * 10}, f"a mask of 10 records; the dataset has {RECORDS}"),
        ({"records": [0.5, 1.0]}, "not an array of float64"),
        ({"records": [[1], [2]]}, r"of shape \(2, 1\)"),
        ({"records": "7"}, "must be a boolean mask"),
        ({"records": {1, 2}}, "must be a boolean mask"),
        ({"records": 7}, "must be a boolean mask"),
        ({"records": np.ma.array([True] * RECORDS, mask=True)}, r"fill it, with mask.filled\(False\)"),
        ({"classes": []}, "select no record"),
        ({"classes": "n01440764"}, "must be a list of class names or labels"),
        ({"classes": 3}, "must be a list of class names or labels"),
        ({"classes": ["dog"]}, r"no class 'dog'; its classes are n\d+, .* labels \(sorted_wnid0\) 0 to 3"),
        ({"classes": [4]}, "no class 4"),
        ({"classes": [-1]}, "no class -1"),
        ({"classes": [[1]]}, r"no class \[1\]"),
        ({"records": [0], "classes": []}, "select no record"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_an_error(
    lmdb_shards: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        loader_on(lmdb_shards, **options)


def test_sizes_in_bytes_are_of_the_chosen_records(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, records=[5], workers=0, batch_size=1) as loader:
        assert loader.stats().image_bytes == loader.dataset.index["length"][5]


def made(path: Path, **options: object) -> None:
    Loader(path, **({"batch_size": 8, "workers": 0} | options)).close()  # type: ignore[arg-type]


def written(path: Path, labels: list[int]) -> Path:
    """A dataset of these labels, stored as they are given."""
    write_dataset([{"key": f"{n:05}", "label": label, "n": n} for n, label in enumerate(labels)], path)
    return path


@pytest.mark.parametrize(
    "options",
    torture_except(
        [{"drop_last": False, "batch_size": 700}, {"rank": 1, "world_size": 2}], {"rank": 1, "world_size": 2}
    ),
)
def test_the_sample_fits_any_plan(tmp_path: Path, options: dict[str, int]) -> None:
    twice = written(tmp_path / "twice", [label for _ in range(2) for label in range(20) for _ in range(25)])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made(twice, shuffle=LocalShuffle(10), **options)

    assert [one.category for one in told] == ([SortedByClass] if "rank" in options else [])


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


MB = 1 << 20
HERE = Path("shards")


def stream(sizes: Sequence[tuple[int, int]], order: Sequence[int], folder: Path = HERE) -> ShardStream:
    """Shards of so many bytes and records, read in this order."""
    shards = [Block(f"{n}", 0, size, records) for n, (size, records) in enumerate(sizes)]
    return ShardStream(folder, shards, np.array(order))


@pytest.fixture
def files(tmp_path: Path) -> ShardStream:
    """Three sparse shards of 10 MB and 10 records, read in the order 2, 0, 1."""
    for name in "012":
        with (tmp_path / name).open("wb") as file:
            file.truncate(10 * MB)
    return stream([(10 * MB, 10)] * 3, [2, 0, 1], tmp_path)


def test_without_fadvise_the_bytes_are_read(monkeypatch: pytest.MonkeyPatch, files: ShardStream) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    lengths: list[int] = []
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda *what: lengths.append(len(read(*what))))
    ahead = ReadAhead(files, budget=MB)

    ahead.expect(np.array([29]))
    until(lambda: len(lengths) >= 4)
    ahead.close()

    assert lengths == [SHARD_END_BYTES, MB, SHARD_END_BYTES, MB]
