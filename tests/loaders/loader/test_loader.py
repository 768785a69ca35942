"""A loader in use: forms of batches, held batches, processes, and options that cannot be meant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats import Dataset, open_dataset
from shardprep.formats.errors import ManifestDamaged, ShardprepError, UsageError
from shardprep.loaders import (
    EvalTransform,
    GlobalShuffle,
    Loader,
    LocalShuffle,
    Receipt,
    SlotsHeld,
    TrainTransform,
)
from support import loader_workers
from support.datasets import converted, is_root
from support.loaded import assert_exactly_once, assert_same, epoch_of, numbers_in
from support.loader_workers import Tagging
from support.sampling import torture_except


@pytest.fixture
def dataset(lmdb_shards: Path) -> Iterator[Dataset]:
    with open_dataset(lmdb_shards) as opened:
        yield opened


def loader_on(path: Path, **options: Any) -> Loader:
    """A loader of small batches, in this thread and with numbers by default."""
    return Loader(path, **({"batch_size": 10, "workers": 0, "with_numbers": True} | options))


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([0, 1], 0))
def test_what_has_no_fixed_size_comes_as_a_list(dataset: Dataset, workers: int) -> None:
    with loader_on(dataset.path, transform=loader_workers.prefix, workers=workers) as loader:
        parts, labels, numbers = next(iter(loader))
    with loader_on(dataset.path, transform=loader_workers.described, workers=workers) as loader:
        mappings, *_ = next(iter(loader))

    assert [isinstance(part, np.ndarray) for part in parts] == [True] * 10
    assert [bytes(p) for p in parts] == [
        dataset[int(n)].image[: len(p)] for p, n in zip(parts, numbers, strict=True)
    ]
    assert mappings["key"] == [dataset[int(n)].key for n in numbers]
    assert mappings["label"].tolist() == labels.tolist()


def test_unlabelled_images_have_the_label_minus_one(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "test", split="test")

    with loader_on(tmp_path / "test", labels="sorted_wnid1_bg", drop_last=False) as loader:
        ((_, labels, _),) = loader

    assert labels.tolist() == [-1, -1, -1]


@pytest.mark.slow
def test_a_full_epoch_of_processes_after_an_early_break_is_exact(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, shuffle=LocalShuffle(50), workers=2, drop_last=False) as loader:
        for steps in (0, 1, 5, 21):
            early = epoch_of(loader, steps)
            assert loader.receipt() == Receipt.of(
                numbers_in(early), dataset=loader.dataset.manifest.root, epoch=loader.epoch - 1
            )
            assert_exactly_once(loader, epoch_of(loader))
        assert loader.epoch == 8


def test_a_second_iterator_ends_the_first_of_processes(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, workers=2, drop_last=False) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        batches = epoch_of(second, 1)

        with pytest.raises(UsageError, match=r"another .* has begun"):
            next(first)

        assert_exactly_once(loader, batches + epoch_of(second))


@pytest.mark.torture
def test_loaders_on_the_same_shards_may_be_nested(lmdb_shards: Path) -> None:
    with (
        loader_on(
            lmdb_shards, transform=Tagging(), shuffle=LocalShuffle(50), batch_size=60, workers=1
        ) as train,
        loader_on(lmdb_shards, transform=EvalTransform(8, resize=9), drop_last=False, workers=1) as validate,
        loader_on(lmdb_shards, drop_last=False) as here,
    ):
        steps = 0
        for _ in train:
            steps += 1
            assert_exactly_once(validate, epoch_of(validate))
            assert_exactly_once(here, epoch_of(here))
        assert steps == 3
        train.receipt().check(204, left_out=24)


@pytest.mark.slow
def test_batches_never_change_however_many_are_held_and_outlive_the_loader(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=Tagging(), workers=2, slots=4, shuffle=GlobalShuffle()) as loader:
        with pytest.warns(SlotsHeld, match="raise `slots`"):
            held = list(loader)
        again = epoch_of(loader)
        loader.set_epoch(0)
        fresh = epoch_of(loader)
        assert loader.stats().copied > 0

    assert len(held) == 20
    assert_same(held, fresh)
    assert numbers_in(fresh) != numbers_in(again)


@pytest.mark.torture
def test_held_bytes_never_change_either(dataset: Dataset) -> None:
    with loader_on(dataset.path, workers=1, slots=4) as loader, pytest.warns(SlotsHeld):
        held = list(loader)

    for images, _, numbers in held:
        assert images == [dataset[int(n)].image for n in numbers]


def test_a_loop_that_drops_its_batches_never_makes_the_loader_copy(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=Tagging(), workers=2, slots=3) as loader:
        for crc, *_ in loader:
            assert crc.ctypes.data % 64 == 0
        assert loader.stats().copied == 0


@pytest.mark.parametrize("options", [{"batch_size": 205}, {"batch_size": 103, "rank": 0, "world_size": 2}])
def test_a_loader_whose_epochs_have_no_batch_is_refused(lmdb_shards: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"204 records has no batch with batch_size=.*drop_last=True"):
        loader_on(lmdb_shards, **options, drop_last=True)


def test_rank_and_world_size_come_from_the_launcher(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")

    with loader_on(lmdb_shards, batch_size=4) as loader:
        _, _, numbers = next(iter(loader))
        assert len(loader) == 17

    assert numbers.tolist() == [4, 5, 6, 7]


def test_a_relative_path_stays_good_when_the_folder_changes(
    lmdb_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lmdb_shards.parent)
    with loader_on(Path("lmdb"), drop_last=False) as loader:
        monkeypatch.chdir(tmp_path)
        assert_exactly_once(loader, epoch_of(loader))


def test_loading_leaves_nothing_in_the_dataset(lmdb_shards: Path) -> None:
    before = sorted(lmdb_shards.iterdir()), lmdb_shards.stat().st_mtime_ns

    with loader_on(lmdb_shards, drop_last=False, workers=1) as loader:
        assert_exactly_once(loader, epoch_of(loader))

    assert (sorted(lmdb_shards.iterdir()), lmdb_shards.stat().st_mtime_ns) == before


def test_loading_in_this_process_leaves_the_threads_of_opencv_alone(lmdb_shards: Path) -> None:
    threads = cv2.getNumThreads()
    cv2.setNumThreads(3)
    try:
        with loader_on(lmdb_shards) as loader:
            for _ in loader:
                assert cv2.getNumThreads() == 3
    finally:
        cv2.setNumThreads(threads)


@pytest.mark.slow
@pytest.mark.skipif(not is_root(), reason="needs leave to become another user")
@pytest.mark.parametrize("container", ["lmdb", "hdf5"])
def test_a_dataset_that_is_only_readable_can_be_loaded(
    container: str, request: pytest.FixtureRequest
) -> None:
    code = """
import os, sys
from shardprep.loaders import Loader
for user in 0, 65534:  # once as root, to have everything imported
    os.setresuid(user, user, user)
    with Loader(sys.argv[1], batch_size=100, workers=0) as loader:
        print(len(list(loader)))
"""
    with TemporaryDirectory() as folder:
        path = shutil.copytree(request.getfixturevalue(f"{container}_shards"), Path(folder) / "dataset")
        for parent in (path, path.parent):
            parent.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("2\n2\n", "")


def test_the_package_limits_opencv_before_opencv_is_imported() -> None:
    code = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "cv2":
            print(os.environ.get("OPENCV_IO_MAX_IMAGE_PIXELS"))

sys.meta_path.insert(0, Watch())
import shardprep.loaders.transforms.transforms
"""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OPENCV")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )

    assert set(done.stdout.split()) == {str(1 << 26)}


@pytest.mark.parametrize("read_ahead", [0, 1, 1 << 40])
def test_reading_ahead_changes_nothing_but_the_time(lmdb_shards: Path, read_ahead: int) -> None:
    with loader_on(lmdb_shards, shuffle=LocalShuffle(20), read_ahead=read_ahead, drop_last=False) as loader:
        assert_exactly_once(loader, epoch_of(loader))


@pytest.mark.slow
def test_a_loader_tells_where_its_time_went(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=TrainTransform(16), workers=1) as loader:
        epoch_of(loader)
        stats = loader.stats()

    assert (stats.rows, stats.batches, stats.restarts) == (200, 20, 0)
    assert stats.stages.keys() == {"read", "decode", "augment"}
    assert 0 < stats.stages["augment"] < stats.stages["decode"] < sum(stats.filling)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_closed_loader_says_so_and_its_batches_stay(dataset: Dataset, workers: int) -> None:
    loader = loader_on(dataset.path, workers=workers)
    batches = iter(loader)
    images, _, numbers = next(batches)

    loader.close()
    loader.close()

    assert images == [dataset[int(n)].image for n in numbers]
    with pytest.raises(UsageError, match="this Loader is closed; make a new one"):
        next(iter(loader))


def test_closing_in_the_middle_ends_the_iteration_with_an_error(lmdb_shards: Path) -> None:
    loader = loader_on(lmdb_shards, workers=1, slots=3, batch_size=5)
    batches = iter(loader)
    next(batches)

    loader.close()

    with pytest.raises(ShardprepError, match="the Loader was closed while it ran"):
        for _ in batches:
            pass


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"batch_size": 32.0}, "batch_size must be an integer, not 32.0"),
    ({"seed": "0"}, "seed must be an integer, not '0'"),
    ({"workers": -1}, "workers must be"),
    ({"workers": "many"}, "workers must be"),
    ({"workers": 1.5}, "workers must be"),
    ({"shuffle": True}, "LocalShuffle"),
    ({"shuffle": 1000}, "LocalShuffle"),
    ({"labels": "wordnet"}, "unknown label space"),
    ({"on_bad_record": "ignore"}, "on_bad_record must be"),
    ({"seed": -1}, "seed must be"),
    ({"seed": 1 << 64}, "seed must be"),
    ({"slots": 2}, "slots"),
    ({"deadline": 0}, "deadline"),
    ({"rank": 1}, "set both or neither"),
    ({"rank": 2, "world_size": 2}, "rank"),
    ({"read_ahead": -1}, "read_ahead must be"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: str(value)[:20])
def test_what_cannot_be_meant_is_an_error_at_once(
    lmdb_shards: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        loader_on(lmdb_shards, **options)


@pytest.mark.parametrize("epoch", [-1, 1 << 64])
def test_an_epoch_that_cannot_be_drawn_is_an_error_at_once(lmdb_shards: Path, epoch: int) -> None:
    with loader_on(lmdb_shards) as loader:
        with pytest.raises(UsageError, match="epoch must be"):
            loader.set_epoch(epoch)
        assert loader.epoch == 0


def test_what_is_no_dataset_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ManifestDamaged):
        Loader(tmp_path)
