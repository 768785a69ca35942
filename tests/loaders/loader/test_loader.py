"""A loader in use: forms of batches, held batches, processes, and options that cannot be meant."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shardprep.formats import Dataset, open_dataset
from shardprep.formats.errors import UsageError
from shardprep.loaders import (
    EvalTransform,
    Loader,
    LocalShuffle,
    Receipt,
    SlotsHeld,
)
from support.datasets import is_root
from support.loaded import assert_exactly_once, epoch_of, numbers_in
from support.loader_workers import Tagging


@pytest.fixture
def dataset(lmdb_shards: Path) -> Iterator[Dataset]:
    with open_dataset(lmdb_shards) as opened:
        yield opened


def loader_on(path: Path, **options: Any) -> Loader:
    """A loader of small batches, in this thread and with numbers by default."""
    return Loader(path, **({"batch_size": 10, "workers": 0, "with_numbers": True} | options))


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


@pytest.mark.torture
def test_held_bytes_never_change_either(dataset: Dataset) -> None:
    with loader_on(dataset.path, workers=1, slots=4) as loader, pytest.warns(SlotsHeld):
        held = list(loader)

    for images, _, numbers in held:
        assert images == [dataset[int(n)].image for n in numbers]


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
