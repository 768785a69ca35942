"""Errors while loading: they are raised at once, with the record's key, and nothing else is lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import Dataset, open_dataset
from shardprep.formats.errors import CorruptRecord, ShardDamaged, UsageError, WorkerDied
from shardprep.formats.shards import columns as shard_cache
from shardprep.loaders import GlobalShuffle, Loader, TrainTransform
from shardprep.loaders.loader import options as loader_options
from shardprep.loaders.loader.work import items_of
from support.datasets import flip, open_files
from support.engine_workers import Once
from support.loaded import Kept, assert_exactly_once, assert_same, epoch_of, numbers_in
from support.loader_workers import (
    CutShort,
    Misdeclared,
    OwnError,
    Tagging,
    die,
    fail,
    hang,
    leave,
    nap,
    nothing,
    reject,
)
from support.sampling import torture_except


@pytest.fixture
def dataset(lmdb_shards: Path) -> Iterator[Dataset]:
    with open_dataset(lmdb_shards) as opened:
        yield opened


def loader_on(path: Path, **options: Any) -> Loader:
    defaults = {"batch_size": 10, "workers": 2, "with_numbers": True, "drop_last": False}
    return Loader(path, **(defaults | options))


@pytest.fixture
def copy(lmdb_shards: Path, tmp_path: Path) -> Path:
    """A copy of a dataset that may be damaged."""
    shutil.copytree(lmdb_shards, tmp_path / "copy")
    return tmp_path / "copy"


def damage(path: Path, *numbers: int) -> None:
    """Flip a bit of each of these records' images."""
    with open_dataset(path) as dataset:
        for number in numbers:
            shard = path / dataset.manifest.shards[int(dataset.index["shard"][number])].name
            flip(shard, shard.read_bytes().index(dataset[number].image) + 50)


@pytest.fixture
def whole(lmdb_shards: Path) -> list[Kept]:
    """An undisturbed epoch of Tagging in stored order."""
    with loader_on(lmdb_shards, transform=Tagging(), workers=0) as loader:
        return epoch_of(loader)


@pytest.mark.slow
def test_after_an_error_the_next_epoch_goes_well(dataset: Dataset, tmp_path: Path) -> None:
    once = Once(tmp_path / "once", fail)
    with loader_on(dataset.path, transform=Tagging({dataset[25].key: once})) as loader:
        with pytest.raises(OwnError):
            epoch_of(loader)
        assert loader.epoch == 1
        assert_exactly_once(loader, epoch_of(loader))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_flipped_bit_is_an_error_with_shard_and_key(copy: Path, workers: int) -> None:
    damage(copy, 31)

    with (
        open_dataset(copy) as dataset,
        loader_on(copy, transform=TrainTransform(8), workers=workers) as loader,
    ):
        batches = iter(loader)
        assert numbers_in(epoch_of(batches, 3)) == list(range(30))
        with pytest.raises(CorruptRecord) as raised:
            next(batches)
        assert raised.value.key == loader.key(31)
        assert raised.value.shard == dataset.manifest.shards[int(dataset.index["shard"][31])].name


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_records_are_skipped_on_request_listed_and_accounted_for(copy: Path, workers: int) -> None:
    damage(copy, 31, 33)
    with open_dataset(copy) as dataset:
        undecodable = Tagging({dataset.index["key"][n].decode(): reject for n in range(50, 60)})
    with loader_on(copy, transform=undecodable, on_bad_record="skip", workers=workers) as loader:
        batches = epoch_of(loader)
        skipped, receipt = loader.skipped, loader.receipt()
        keys = [loader.key(n) for n in (31, 33, *range(50, 60))]

    assert len(batches) == 21
    assert batches[3][-1].tolist() == [30, 32, 34, 35, 36, 37, 38, 39]
    assert [len(part) for part in batches[5]] == [0] * 5
    assert sorted(skipped) == sorted(keys)
    assert "CRC-32C" in skipped[keys[0]]
    assert skipped[keys[-1]] == "does not decode"
    receipt.check(204, skipped=12)


@pytest.mark.slow
@pytest.mark.parametrize("container", torture_except(["lmdb", "hdf5"], "lmdb"))
def test_a_shard_cut_short_under_its_reader_is_an_error_and_the_parent_lives(
    container: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    shutil.copytree(request.getfixturevalue(f"{container}_shards"), tmp_path / "copy")
    with open_dataset(tmp_path / "copy") as dataset:
        key, first = dataset[0].key, dataset.path / dataset.manifest.shards[0].name

    with (
        loader_on(tmp_path / "copy", transform=Tagging({key: CutShort(first)}), workers=1) as loader,
        pytest.raises(ShardDamaged) as raised,
    ):
        epoch_of(loader)

    assert first.name in str(raised.value)
    assert loader.stats().restarts == 0


@pytest.mark.torture
def test_a_shard_that_is_replaced_by_an_equal_one_changes_nothing(copy: Path) -> None:
    with loader_on(copy, transform=Tagging({"": nap}), workers=1, slots=3) as loader:
        batches = iter(loader)
        delivered = epoch_of(batches, 2)
        for shard in copy.glob("shard-*"):
            shutil.copy(shard, copy / "new")
            (copy / "new").replace(shard)
        assert_exactly_once(loader, delivered + epoch_of(batches))


def deaths(dataset: Dataset, folder: Path, kills: int) -> Tagging:
    """A transform that kills its process at so many records, once at each."""
    keys = random.Random(0).sample([dataset[n].key for n in range(204)], kills)
    return Tagging({key: Once(folder / key.replace("/", "-"), die) for key in keys})


@pytest.mark.parametrize(("workers", "kills"), torture_except([(2, 2), (1, 10), (4, 20)], (2, 2)))
def test_killed_workers_lose_and_repeat_nothing(
    dataset: Dataset, whole: list[Kept], tmp_path: Path, workers: int, kills: int
) -> None:
    with loader_on(dataset.path, transform=deaths(dataset, tmp_path, kills), workers=workers) as loader:
        batches = epoch_of(loader)
        assert_exactly_once(loader, batches)
        assert loader.stats().restarts == kills

    assert_same(batches, whole)


@pytest.mark.torture
@pytest.mark.parametrize(
    ("end", "cause"),
    [(die, "SIGKILL"), (leave, "exit code 0"), (hang, "no progress for 0.3 s; give a longer deadline")],
)
def test_a_record_that_ends_every_worker_is_named(dataset: Dataset, end: Any, cause: str) -> None:
    key, deadline = dataset[25].key, 0.3 if end is hang else None
    with loader_on(dataset.path, transform=Tagging({key: end}), deadline=deadline) as loader:
        batches = iter(loader)
        assert numbers_in(epoch_of(batches, 2)) == list(range(20))
        with pytest.raises(WorkerDied, match=cause) as raised:
            next(batches)
        assert raised.value.key == key
        assert loader.state_dict()["place"] == 20


@pytest.mark.slow
def test_a_transform_that_cannot_be_found_in_a_worker_is_an_error_and_no_hang(lmdb_shards: Path) -> None:
    with (
        loader_on(lmdb_shards, transform=Vanishing(), workers=1) as loader,
        pytest.raises(ModuleNotFoundError, match="no_such_module"),
    ):
        next(iter(loader))


class Vanishing(Tagging):
    """A transform that unpickles as a name that workers cannot import."""

    def __reduce__(self) -> Any:
        return _import, ("no_such_module",)


def _import(name: str) -> Any:
    return __import__(name)


@pytest.mark.parametrize(
    ("transform", "message"),
    [(nothing, "returned None"), (Misdeclared(), r"declares uint8\[3\] and returns uint8\[4\]")],
)
def test_a_transform_that_breaks_its_word_is_an_error_with_the_key(
    lmdb_shards: Path, transform: Any, message: str
) -> None:
    with loader_on(lmdb_shards, transform=transform, workers=0) as loader:
        with pytest.raises(UsageError, match=message) as raised:
            next(iter(loader))
        assert raised.value.key == loader.key(0)


@pytest.mark.parametrize("container", ["lmdb", "hdf5"])
def test_a_record_that_is_intact_but_another_one_is_an_error(
    container: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_another_crc(*given: Any, **draws: Any) -> Any:
        items = items_of(*given, **draws)
        items["crc32c"][3] ^= 1
        return items

    monkeypatch.setattr(loader_options, "items_of", with_another_crc)
    with (
        loader_on(request.getfixturevalue(f"{container}_shards"), workers=0) as loader,
        pytest.raises(CorruptRecord, match="record 3 does not match its CRC-32C"),
    ):
        next(iter(loader))


@pytest.mark.slow
@pytest.mark.parametrize("container", ["lmdb", "hdf5"])
def test_few_shards_are_open_at_once_and_none_when_the_epoch_is_over(
    container: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "MAX_OPEN", 3)
    path = request.getfixturevalue(f"{container}_shards")
    with loader_on(path, workers=0, shuffle=GlobalShuffle(), batch_size=1) as loader:
        before, most = open_files(path), 0
        for _ in loader:
            most = max(most, open_files(path) - before)

    assert 1 < most <= 3
    assert open_files(path) == 0
