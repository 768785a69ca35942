"""A loader in use: forms of batches, held batches, processes, and options that cannot be meant."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import ManifestDamaged, OperationError, ShardprepError, UsageError
from shardprep.loaders import (
    GlobalShuffle,
    Loader,
    LocalShuffle,
    SlotsHeld,
    TrainTransform,
    TransformInput,
    decode_rgb,
)
from support.datasets import converted, is_root
from support.loaded import assert_exactly_once, assert_same, epoch_of, numbers_in
from support.loader_workers import Tagging


def loader_on(path: Path, **options: Any) -> Loader:
    """A loader of small batches, in this thread and with numbers by default."""
    return Loader(path, **({"batch_size": 10, "workers": 0, "with_numbers": True} | options))


def test_unlabelled_images_have_the_label_minus_one(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "test", split="test")

    with loader_on(tmp_path / "test", labels="sorted_wnid1_bg", drop_last=False) as loader:
        ((_, labels, _),) = loader

    assert labels.tolist() == [-1, -1, -1]


def test_a_loop_that_drops_its_batches_never_makes_the_loader_copy(lmdb_shards: Path) -> None:
    before = sorted(lmdb_shards.iterdir()), lmdb_shards.stat().st_mtime_ns
    with loader_on(lmdb_shards, transform=Tagging(), workers=2, slots=3) as loader:
        for crc, *_ in loader:
            assert crc.ctypes.data % 64 == 0
        stats = loader.stats()

    assert (stats.rows, stats.batches, stats.restarts, stats.copied) == (200, 20, 0, 0)
    assert (sorted(lmdb_shards.iterdir()), lmdb_shards.stat().st_mtime_ns) == before
    assert stats.stages.keys() == {"read", "decode", "augment"}
    assert 0 < stats.stages["augment"] < sum(stats.filling)


def test_closing_in_the_middle_ends_the_iteration_with_an_error_and_its_batches_stay(
    lmdb_shards: Path,
) -> None:
    loader = loader_on(lmdb_shards, workers=1, batch_size=5)
    batches = iter(loader)
    images, _, numbers = next(batches)

    loader.close()
    loader.close()

    with pytest.raises(ShardprepError, match="the Loader was closed while it ran"):
        for _ in batches:
            pass
    with pytest.raises(UsageError, match="this Loader is closed; make a new one"):
        next(iter(loader))
    with open_dataset(lmdb_shards) as dataset:
        assert images == [dataset[int(n)].image for n in numbers]


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


def test_rank_and_world_size_come_from_the_launcher(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")

    with loader_on(lmdb_shards, batch_size=4) as loader:
        _, _, numbers = next(iter(loader))
        assert len(loader) == 17

    assert numbers.tolist() == [4, 5, 6, 7]


def test_loading_in_this_process_leaves_the_threads_of_opencv_alone(lmdb_shards: Path) -> None:
    threads = cv2.getNumThreads()
    cv2.setNumThreads(3)
    try:
        with loader_on(lmdb_shards) as loader:
            for _ in loader:
                assert cv2.getNumThreads() == 3
    finally:
        cv2.setNumThreads(threads)


def test_a_forked_copy_of_an_iterator_is_refused(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                next(batches)
            except UsageError:
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        rest = sum(1 for _ in batches)

    assert os.waitstatus_to_exitcode(status) == 0
    assert rest == len(loader) - 1


@pytest.mark.slow
@pytest.mark.skipif(not is_root(), reason="needs leave to become another user")
def test_datasets_that_are_only_readable_can_be_loaded(lmdb_shards: Path, hdf5_shards: Path) -> None:
    code = """
import os, sys
from shardprep.loaders import Loader
for user in 0, 65534:  # once as root, to have everything imported
    os.setresuid(user, user, user)
    for path in sys.argv[1:]:
        with Loader(path, batch_size=100, workers=0) as loader:
            print(len(list(loader)))
"""
    with TemporaryDirectory() as folder:
        paths = [shutil.copytree(path, Path(folder) / path.name) for path in (lmdb_shards, hdf5_shards)]
        for path in (*paths, Path(folder)):
            path.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("2\n" * 4, "")


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
def test_reading_ahead_changes_nothing_but_the_time(
    lmdb_shards: Path, read_ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lmdb_shards.parent)
    with loader_on(Path("lmdb"), shuffle=LocalShuffle(20), read_ahead=read_ahead, drop_last=False) as loader:
        monkeypatch.chdir(tmp_path)  # a relative path stays good
        assert_exactly_once(loader, epoch_of(loader))


def test_an_epoch_a_folder_and_slots_that_cannot_be_meant_are_errors_at_once(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    with loader_on(lmdb_shards) as loader:
        for epoch in (-1, 1 << 64):
            with pytest.raises(UsageError, match="epoch must be"):
                loader.set_epoch(epoch)
        assert loader.epoch == 0
    with pytest.raises(ManifestDamaged):
        Loader(tmp_path)
    with pytest.raises(OperationError, match="slots"):
        Loader(lmdb_shards, batch_size=200, transform=TrainTransform(224), workers=1, slots=10**7)


Rng = np.random.Generator


def parts(record: TransformInput, rng: Rng) -> Any:
    image = np.resize(decode_rgb(record.image), (16, 16, 3)) * np.float32(rng.random())
    return image, rng.random(), np.int16(record.label), record.label > 1


@pytest.mark.torture
def test_results_are_the_same_written_by_workers_sent_by_them_or_made_here(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_on(lmdb_shards, transform=parts) as loader:
        expected = epoch_of(loader)
    assert [part.dtype for part in expected[0]] == ["f4", "f8", "i2", "?", "i8", "i8"]
    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        assert_same(epoch_of(loader), expected)
        with loader._batches(iter([(np.arange(10), 0)]), 0, loader._plan) as batches:
            for batch in batches:  # from the second batch on, no result is sent
                assert not batch.payloads
                assert [array.ctypes.data % 64 for array in batch.arrays.values()] == [0] * 4
        assert 0 < loader.engine.shared_bytes < 64 << 20  # of the rows that were written
    assert loader.engine.shared_bytes == 0

    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1 << 40, 1 << 40))
    with loader_on(lmdb_shards, transform=parts, workers=1) as loader:
        assert loader.engine.layout.inputs == 0
        assert_same(epoch_of(loader), expected)
